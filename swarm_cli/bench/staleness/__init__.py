"""`swarm bench staleness`: what stale and foreign rollouts cost, and which objective copes, on tiny policies.

bench.py --> lags.py      --> workers.py --a process per core--> lagged.py  (one run with stale rollouts)
         --> mixtures.py  -->            -->                     swarm.py   (one run of unlike policies)
         --> report --> plot.py                 |
                  ledger.py <-- finished runs --'
a run:  tasks.py --questions--> answers.py (plain.py, mismatch.py) --> buffer.py --> node.train --> curve
"""
