"""From a recipe and a history to tables in fewer bytes: what was measured, what is best for a budget, and a recipe.

window      which rows are history, and which later ones are measured on
probe       how often ids come, and what a small model learns of them
schedule    which sizes and methods are tried, and in which order
trials      one of them: train the model with one table compressed, and measure it
folder      all of that on disk, so that a killed command goes on
ordered     whether ids say something by their order
advise      all together
advice      what comes of it, as values
words       the same, as lines for people
"""
