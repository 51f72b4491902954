"""Language models over fixed vocabulary codes.

An arm is put together in ``arm`` from ``vocab`` and ``bodies``, as ``settings`` and ``presets`` say. ``data`` prepares text,
``training`` trains, ``evaluation`` and ``harness`` score, ``generation`` and ``server`` write text; ``packed`` makes one file of an
arm, which ``engine`` runs on a CPU; ``convert`` brings in models of others.
"""
