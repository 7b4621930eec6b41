"""The coverage audit: every GPU kernel of a prefill and of captured decode steps, and its rule.

`run` starts the server and asks it for a trace (`drive`); `kernels_seen` counts the kernels in it,
`rules` finds the rule for each name in `rules_data`, `report` says which kernels have none.
"""
