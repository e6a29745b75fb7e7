"""`rowwise compress`: measures id maps on a recipe's data, and allocates a budget of bytes to tables.

window      history rows, and later rows to measure on
probe       frequencies of ids, and vectors that a small model learns for them
schedule    the order of trials: methods and sizes
trials      one trial: train the model with one table compressed, and measure it
folder      files of measurements, so that a killed command continues
ordered     whether the order of ids carries information
advise      all steps together
advice      the result as values
words       the result as printed lines
"""
