"""What a model is worth: the loss of each token of a text, questions with several answers.

scorer.py       the loss of each token of many rows, on one device or several
choices.py      answers to questions, and how many are right
"""
