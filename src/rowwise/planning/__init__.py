"""Plans and forecasts: costs of a step, the search for a plan, measurements of a machine, steps on other machines."""
