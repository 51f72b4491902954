"""A tiny multiple-choice task of our own: which word continues a familiar sequence. Needs no data and no network."""

from typing import Any

SEQUENCES = {
    "numbers": "one two three four five six seven eight nine ten eleven twelve",
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "months": "January February March April May June July August September October November December",
    "letters": "A B C D E F G H I J K L",
    "tens": "ten twenty thirty forty fifty sixty seventy eighty ninety",
    "ranks": "first second third fourth fifth sixth seventh eighth ninth tenth",
}
GIVEN = 3  # words of a sequence that a question shows
CHOICES = 4


def questions() -> list[dict[str, Any]]:
    """Every place in every sequence: ``{"text", "choices", "label"}``. The wrong choices are other words of the sequence."""
    found = []
    for words in (text.split() for text in SEQUENCES.values()):
        for start in range(len(words) - GIVEN):
            answer = start + GIVEN
            others = [words[(answer + 2 + k) % len(words)] for k in range(CHOICES - 1)]  # not the neighbours that come next
            label = len(found) % CHOICES
            others.insert(label, words[answer])
            found.append({"text": ", ".join(words[start:answer]) + ",", "choices": others, "label": label})
    return found


def dataset(**_: Any) -> dict[str, Any]:
    """The questions as lm-eval takes them (``custom_dataset``)."""
    from datasets import Dataset

    return {"test": Dataset.from_list(questions())}


CONFIG: dict[str, Any] = {
    "task": "sequences",
    "custom_dataset": dataset,
    "output_type": "multiple_choice",
    "test_split": "test",
    "fewshot_split": "test",  # lm-eval leaves out the question itself
    "doc_to_text": "{{text}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
    "metadata": {"version": 1.0},
}
