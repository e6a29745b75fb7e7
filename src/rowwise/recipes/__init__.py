"""Recipes: everything that a run is made of, in one YAML file, and the only code that puts the parts together.

`recipe` says what a recipe holds, `text` reads and writes it, `find` knows those that ship; none of these needs torch.
`compose` makes data, model and trainer of one, `runs` are the verbs of the command line as functions.
"""
