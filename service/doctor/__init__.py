"""Whether machines are fit to be searched on: facts are gathered on each node (`gather`, `nodes`), kept (`history`),
and judged apart from that (`checks`)."""
