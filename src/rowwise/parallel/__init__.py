"""Tables on many devices: the plan that places them, collectives, and the runtime that looks up and updates by it."""
