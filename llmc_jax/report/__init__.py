"""One page about a run, or several over each other: curves, samples, events, what ran it, what differs.

`llmc-jax report`. What a page contains is plain data (content.py), gathered from run folders and logs
(gather.py); page.py draws it. Leaves out reading single files (logs/).
"""
