"""What a model is worth: the loss of each token of a text, questions with several answers.

job.py          what models are asked, and what comes of it
choices.py      answers to questions, and how many are right
figures.py      figures with standard errors, and their differences
texts.py        losses of token files and texts, row by row
subjects.py     texts and tasks as a model reads them, and what it makes of them
report.py       several models side by side: a table, plain data
"""
