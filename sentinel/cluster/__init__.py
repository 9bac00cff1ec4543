"""A job over several nodes: one view of it, one page for each incident, one restart.

    node daemon -> numbered events, a pulse a second -> coordinator -> one incident, one page
                <- a beat a second: what was applied, who is there, what all are to do <-

The coordinator is a role (`lead`): the daemon of global rank 0's node has it, and another takes over if that dies
(`protocol/election`). `protocol/` is what the nodes say to each other and what follows from it, without network and
clock; `session` alone imports Zenoh; `membership` puts them together for one run.
What people ask of the whole job is asked of the nodes on demand (`inquiry`), and travels at no other time.
Orders are for the supervisors (`sentinel run`), which end and start their ranks; none is for a rank.
"""
