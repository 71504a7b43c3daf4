"""`swarm bench broadcast`: how long a blob takes from one node to n others over home uplinks.

    bench.py --> networks.py: a namespace per node, 20 Mbit/s up and down
             --> crowd.py: a process per node --pipe--> peer.py --> swarm.py | torrent.py
             --> report

All nodes are connected to each other and know what will come before the start; the clock runs from there to
the last receiver that has all and has verified it. Control goes through pipes, nothing of it over the links.
"""
