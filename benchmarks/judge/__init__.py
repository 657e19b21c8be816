"""Models and samplers against what was measured."""
