"""Rows prepared by processes of their own, as many as it takes for trainers never to wait, and delivered exactly once.

`coordinator` decides (pure), `host` and `worker` are the processes of one machine, `client` is a trainer's end,
`local` starts them. See [Note: exactly once] in `coordinator.py`.
"""
