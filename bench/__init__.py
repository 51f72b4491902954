"""Microbenchmarks: one file per op under the op's name, and a frame that times, measures memory, checks and reports.

    python -m bench kronecker --impl naive,eager --peers     table, rows and plots of one op
    python -m bench code_loss --T 1024 --V 262144 --no-sweep one shape only
    pytest bench                                             the same cases at small shapes through pytest-benchmark

Programs of their own, each with its --help: ``step.py`` and ``trainer.py`` (training steps), ``harness.py`` (lm-eval),
``packed_linear.py``, ``engine_kernels.py`` and ``generation/`` (the CPU), ``code_int8.py`` and ``code_skip.py`` (options of the
loss), ``ledger/`` (machine code, no GPU) and ``gpu/`` (all that needs one). The rest is the frame of ``python -m bench OP``.

Read ``case.py`` (what an op file declares), then ``kronecker.py`` (one op), ``gate.py`` (no speed for a wrong result),
``frame.py`` (timing), ``memory.py`` (extra memory) and ``report.py`` / ``plots.py`` (what is written).

Results go to ``runs/bench/`` (``--out bench/results`` publishes them): ``OP.jsonl`` gains one JSON object per provider, shape and
direction at each run (rows are appended, never rewritten, so that the file is a history; each row carries the commit, the machine
and the command), and ``OP.png`` shows the sweeps of the latest run.
"""
