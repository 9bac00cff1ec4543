"""A job over several nodes: one view of it, one page for each incident, one restart.

    node daemon -> numbered events, a pulse a second -> coordinator -> one incident, one page
                <- a beat a second: events applied, nodes present, orders to all nodes <-

The coordinator is a role (`lead`): the daemon of global rank 0's node has it, and another takes over if that dies
(`protocol/election`). `protocol/` holds the messages between the nodes and the decisions made from them, without
network and clock; only `session` imports Zenoh; `membership` puts them together for one run.
What people ask about the whole job is fetched from the nodes on demand (`inquiry`), and is not sent otherwise.
Orders are for the supervisors (`sentinel run`), which end and start their ranks; none is for a rank.
"""
