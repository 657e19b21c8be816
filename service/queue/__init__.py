"""Several searches on one cluster: which of them has which nodes, and how much of them its user may have."""
