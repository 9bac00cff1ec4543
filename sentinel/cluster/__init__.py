"""A job over several nodes: one view of it, and one page for each incident.

    node daemon -> numbered events, a pulse a second -> coordinator -> one incident, one page
                <- a beat a second: what was applied, who is there <-

The coordinator is a role: the daemon of global rank 0's node has it. `node`, `coordinator` and `job_incident` are the
protocol, without network and clock; `session` alone imports Zenoh; `membership` puts them together for one run.
Nothing here gives an order to a rank.
"""
