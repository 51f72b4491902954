r"""Generation on a CPU, measured: our engine, eager PyTorch, and llama.cpp on the same shape, in one interleaved run.

Models with random weights of a preset's exact shape (no text comes out of them; how many codes are read depends on the prior and
the head, which ``make.py`` makes like trained ones, or on a flat prior: then all codes are read):

    python -m bench.generation make out/c.tfree --preset gemma3-270m --arm C
    python -m bench.generation make out/c-half.tfree --preset gemma3-270m --arm C --map-dtype float16
    python -m bench.generation make out/c-flat.tfree --preset gemma3-270m --arm C --prior flat
    python -m bench.generation make out/a.gguf --preset gemma3-270m --arm A            # for llama.cpp (pip install gguf)
    llama-quantize out/a.gguf out/a-Q8_0.gguf Q8_0
    llama-quantize --pure out/a.gguf out/a-Q4_0.gguf Q4_0
    llama-quantize --token-embedding-type q4_0 out/a.gguf out/a-TQ2_0.gguf TQ2_0

The run (rows go to runs/bench/generation.jsonl and the picture beside it; ``--out bench/results`` publishes both):

    python -m bench.generation measure out/c.tfree --eager out/c.tfree --llama-bench build/bin/llama-bench \
        --gguf Q8_0=out/a-Q8_0.gguf --gguf Q4_0=out/a-Q4_0.gguf --gguf TQ2_0=out/a-TQ2_0.gguf --rounds 5 --out bench/results
    python -m bench.generation draw --out bench/results                                 # the picture again, of the latest run

llama.cpp holds the merges of such a BPE in memory: 39 MB more than a SentencePiece vocabulary of this size. To compare memory with
a model of that kind give a GGUF file of the same shape with one.

A figure that a noisy machine cannot move, instructions per token under valgrind (one thread):

    python -m bench.generation count out/c.tfree --llama-bench build/bin/llama-bench --gguf Q8_0=out/a-Q8_0.gguf

How it is measured. Every provider and thread count is a process of its own (``child.py``, llama-bench), and they take turns: a
round is one process of each. Reported are medians and the 20th and 80th percentile over the rounds, and of ratios the median of the
rounds' ratios. Each row also says which share of the machine's CPU time other processes had in each round (/proc/stat, less the
process's own): quiet rounds are those where it is near 0. ``decode at D``: tokens/s of so many tokens one by one, from a context of
D tokens on (ours takes the best token of all scores each time; llama-bench computes all scores and samples none). ``prefill``:
tokens/s of reading a prompt. ``memory``: the largest resident set of a fresh process that only decodes ids, and the context it had;
``text``: that of ``python -m models.generation`` with a text of 60 characters, until 64 tokens more were drawn greedily.

``floor``: the engine's own process reads as many bytes as a token needs (of the file all matrices and the prior once, of an untied
input table a row, of the codes what the decoded tokens took, ``code_bytes``; the keys and values that it attends to) with as many
threads, from memory with huge pages, by the C library's search for a byte that is not there. That is a pure read, the least a
memory-bound token can take; ``share`` is its time over the token's. A processor's cache that holds a part of the bytes lifts both.
"""
