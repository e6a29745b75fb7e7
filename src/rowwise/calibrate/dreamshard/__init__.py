"""Trains the policy that `planner.methods.dreamshard` takes its largest logits of. See [Note: dreamshard] there.

Made-up tasks from pools of tables, a cost network that is fitted to what a cost model says of placements, and a policy
that learns from the cost network alone. Its own package because planning must not load tensors, and training must.
"""
