"""`swarm bench soak`: real nodes for a long time, with few descriptors, and with what happens in a month."""
