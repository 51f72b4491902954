"""Everything that needs a real GPU, as one run of fixed length: tests, times of every provider, modelled beside measured, training.

    python -m bench.gpu --budget 480            the whole run; rows, pictures and a table in runs/gpu
    python -m bench.gpu --list                  its steps and their seconds
    python -m bench.gpu --rehearse              the same on a CPU: tiny shapes, Triton's interpreter, a temporary folder

Every step is a process of its own (``child.py``) with a time limit: one that crashes or hangs costs itself only. Rows go to
``rows.jsonl`` as they come, so that a run cut short loses only its tail. It needs torch, triton, numpy, matplotlib and pytest, no
network, no data. Read ``plan.py`` (the steps and how they share the budget) first, then the step of interest.
"""
