"""Training of the DreamShard policy of the library: [Note: DreamShard] in `planning/planner/methods/dreamshard.py`.

Tasks are drawn from pools of synthetic tables. A cost network is fitted to the cost model's numbers for placements, and
the policy learns from the cost network alone. `rowwise plan --method dreamshard` needs the file of weights, not this.
"""
