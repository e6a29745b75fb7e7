"""`rowwise compress`: measures id maps on a recipe's data, and allocates a budget of bytes to tables.

window        history rows, and later rows to measure on
selection     tables to compress, and their budget
probe, refit  counts of ids, and vectors that a small model learns for them
schedule      the trials to run: tables, methods and sizes
trials        one trial: train the model with one table compressed, and measure it
trial_runner  runs the missing trials of a schedule
folder        files of measurements, so that a killed command continues
results       measured losses of each table and method
id_order      whether neighbouring ids are alike
advise        all steps together
advice        the advice as values
explain       the advice as printed lines
"""
