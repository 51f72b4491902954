"""The ledger: judges the Triton kernels without a GPU.

    python -m bench.ledger                                         everything, to bench/results/ledger.json
    python -m bench.ledger --op sign_code --arch sm_90 --json /tmp/a.json       part of it
    python -m bench.ledger --op sign_code --arch sm_90 --diff /tmp/a.json       what a change did

For every case of every op (``bench/ledger/OP.py``) it runs the op's host code on meta tensors (``kernels.launch.recording``),
compiles exactly what would be launched for five chips (``chips.py``), disassembles it, finds the main loop (``flow.py``) and models
its time (``model.py``). ``rules.py`` says what no shipped kernel may do; the test suite enforces it.

Columns: regs and spill per thread (registers, bytes of local memory); shared memory of a program against the chip's limit; the
matrix instruction; instructions of the main loop ("48/4": 48 that hold 4 trips of the source's loop; "(200)": no loop, the whole
kernel); local-memory instructions in it; modelled time; the limit that binds; the share of the bound; the time with waits, and its
share. --timeline prints what the warps of each launch wait for, and at which instructions.

The model
    A launch takes as long as its busiest resource, plus a ramp of 1 us:
        issue    instructions x warps / 4 per cycle (a warp issues at most one a cycle); main loop x trips, rest of the kernel once
        fma, imad, alu, xu, lsu (AMD: valu, salu, xu, lds, lsu)   the same instructions by the pipe that executes them
        tensor   FLOP of the matrix instructions in the code / the rate of that instruction family, of which 83 % is reached
        shared   bytes of LDS, STS, LDSM, cp.async and of the operands that warp-group products read / 128 per cycle
        L2, HBM  declared bytes / bandwidth (HBM: the 90 % that a copy reaches)
        latency  rounds of resident programs (registers, shared memory, warps) x the dependent accesses of one program
    All but L2 and HBM are counted on the busiest unit: ceil(programs / units) programs, so a partly filled last wave costs a whole.
    A case is the sum of its launches and of the PyTorch operators that its host code runs in between.
    The bound is what the data sheet allows: compulsory HBM bytes at full bandwidth, or FLOP at the full matrix rate; no launch.
    So a perfect streaming kernel reaches 90 % of its bound, a perfect product 83 %, and less where 1 us counts.

The time with waits (NVIDIA; ``timeline.py``, ``timeline_steps.py``, ``timeline_launch.py``)
    The machine code says of every instruction how many cycles to stall and which scoreboards to wait for and to set. A few trips of
    the main loop, and once the code around it, run in a simulation of one of an SM's four sub-cores with all resident warps:
    in-order issue, one instruction a cycle, busy units and their queues, latencies of loads, XU, shuffles and products, barriers,
    groups of cp.async, of warp-group products and of products in tensor memory, and this SM's share of the bandwidth that the
    declared bytes need. Rounds of resident programs follow each other. Two runs, all loads hitting in L2 and all missing it; the
    time shown lies between them by the share of the requested bytes that comes from HBM, and is never below the bound above.
    It assumes that the four sub-cores do the same, no bank conflict, coalesced accesses, branches that all fall through (a program
    does all the code outside its loops once), and latencies from memory or guessed, as marked. Programs whose loop is empty leave
    at once and are not simulated. Where nothing overlaps it is close to what the code does; two programs that share an SM are
    simulated as they drift apart from one start. AMD code has no such fields and is not simulated. TMA is not modelled.

What the model leaves out: it is a lower bound. It assumes that everything overlaps perfectly: no barrier, no wait for a matrix
instruction or a dependent instruction, no bank conflict, no uncoalesced or partly used sector, no cache miss beyond the declared
bytes, no clock drop, no launch overhead on the host. What sm_100's UTC*MMA reads from shared memory is not counted (a descriptor
hides it).
Functions called from the loop, and loops outside the main loop's nest, count as one trip. Latencies and L2 rates are public figures
from memory. Use it to compare two versions of a kernel and to see what binds, not to predict a stopwatch.

How to add an op (once kernels/OP/fused.py exists, the ledger refuses to run without bench/ledger/OP.py; see binary_code.py)
    CASES  list of Case(name, direction, dtype, shape, run, bound, ...). ``run`` makes meta tensors and calls the functions of the
           op's fused module directly (``fused.embed(...)``; the registered operator would only run its fake). One case a direction
           and dtype at the paper's shape. ``bound``: bytes no implementation can avoid. matrix=True when NVIDIA targets must use a
           matrix instruction; shares={"sm_90": 0.6} is enforced (waits_shares: with waits); baselines={"eager": (Pass("gather",
           bytes), ...)} are shown.
    WORK   {kernel's name: function(launch, case) -> Work}, launch.arguments by parameter name, launch.grid. Bytes and flops of the
           whole launch, iterations of the source's main loop per program (0 < mean when they differ), chain of dependent loads:
               def gathered(launch, case):
                   tokens, width = case.shape["T"], case.shape["d"]
                   return Work(hbm_read=tokens * 8 + table, hbm_write=tokens * width * 2, l2_read=tokens * 6 * width * 2,
                               iterations=6, chain=Chain(hbm=1, l2=2))
           flops is checked against the machine code (rules.declared_flops), so wrong iterations show. A kernel without an entry is
           an error that names it. ptxas's unrolling is seen by itself, from the remainder loop or from the flops.
    Host operators of ``run`` (torch.sort, zeros, ...) are modelled by record.py and listed; an unknown one is an error.
    Then: python -m bench.ledger --op OP --arch sm_90 --sass /tmp/sass
"""
