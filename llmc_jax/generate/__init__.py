"""Asking a trained model: text that it continues, what it thinks of a text, a page to type into.

model.py        a checkpoint of any format, opened: weights on the device, shape, tokenizer
sampling.py     from logits to the next token: temperature, top-k, top-p, random numbers
engine.py       prefill, decode, and what happens at the model's last position
text.py         tokens to text that can be printed: whole characters, stop strings
llmc.py         llm.c's samplers, as a training run draws
scorer.py       the loss of each token of many rows, on one device or several
look.py         the probabilities that the model gives to a text; shown as a table, as plain data
heads.py        the weights of attention, and their picture
serve.py        a page on this machine to ask the model with (page.html); page.py: what it asks and is told
answer.py       a request answered: samples collected, timed, ended by Ctrl-C; a text written in turns

Leaves out the model's own forward (models/gpt2/model.py, decode.py) and the command line (generate/command.py).
"""
