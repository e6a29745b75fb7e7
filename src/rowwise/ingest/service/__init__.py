"""Worker processes that prepare splits for trainers: autoscaled to the trainers' demand, delivered exactly once.

`coordinator` and `scaling` decide (pure); `host` and `worker` are the processes of one machine, `client` is a trainer's
end, `local` starts them; `cluster` runs the same on Ray. See [Note: exactly once] in `coordinator.py`.
"""
