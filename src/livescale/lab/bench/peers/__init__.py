"""What runs in a process of its own during `bench engine`: one file per engine, and the judge.

A peer reads one JSON object per line and answers each with one; `line_server.py` has the words.
"""
