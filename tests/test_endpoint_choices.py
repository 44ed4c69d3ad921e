"""What may be chosen of an endpoint and what is refused in one line, and what a bill counts."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from iclperm.endpoint import Endpoint, EndpointChoices, Spent, estimate_bill
from iclperm.errors import ConfigError
from iclperm.study.endpoint import Prices

DEMO_TOKENIZER = str(Path(__file__).resolve().parents[1] / "iclperm/demo/model")
SENTINEL = "sk-sentinel-0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"api_key_env": SENTINEL}, "'api_key_env' is not the name of an environment variable"),
        ({"api_key_env": "AKIAIOSFODNN7EXAMPLE"}, "'api_key_env' is not the name of an environment variable"),
        ({"extra": {"authorization": f"Bearer {SENTINEL}"}}, "'extra' seems to hold a secret"),
        ({"model": SENTINEL}, "'model' seems to hold a secret"),
        ({"base_url": "https://me:secret@example.com/v1"}, "'base_url' may hold a secret"),
        ({"base_url": "https://example.com/v1?key=secret"}, "'base_url' may hold a secret"),
    ],
)
def test_keys_are_refused_where_names_belong_and_not_repeated(choices, said):
    with pytest.raises(ConfigError) as refused:
        EndpointChoices(**{"base_url": "https://example.com/v1", "model": "m", **choices})
    assert said in str(refused.value)
    assert "secret@" not in str(refused.value)
    assert "=secret" not in str(refused.value)
    assert not any(key in str(refused.value) for key in (SENTINEL, "AKIAIOSFODNN7EXAMPLE"))


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"base_url": "example.com"}, "an endpoint's key 'base_url' is 'example.com': give a URL such as https://"),
        ({"modell": "m"}, "an endpoint has no key 'modell'; did you mean 'model'?"),
        ({"max_cost": 1.0}, "'max_cost' needs 'prices'"),
        ({"extra": {"temperature": 1}}, "'extra' holds 'temperature', which has a place of its own"),
        ({"draws": 0}, "an endpoint's key 'draws' is 0"),
        ({"timeout_s": 500}, "'timeout_s' is 500, over its deadline_s of 300"),
        ({"extra": {"seed": object()}}, "'extra"),
        ({"prices": {"input": 1.0}}, "'output'"),
        ({"api": "responses"}, "an endpoint's key 'api' is 'responses'"),
    ],
)
def test_choices_that_do_not_fit_are_refused_in_one_line(choices, said):
    with pytest.raises(ConfigError) as refused:
        EndpointChoices(**{"base_url": "https://example.com/v1", "model": "m", **choices})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_choices_survive_yaml_and_identify_answers_not_places():
    choices = EndpointChoices(base_url="https://a.example/v1/", model="m", prices={"input": 1.0, "output": 2.0})
    assert choices.base_url == "https://a.example/v1"
    assert choices.identity["model"] == "m"
    assert not {"base_url", "prices", "concurrency", "api_key_env", "tokenizer"} & set(choices.identity)
    assert set(choices.scored_identity) - set(choices.identity) == {"tokenizer"}
    assert Endpoint.of(choices).choices == choices


def test_a_bill_counts_cached_prefixes_in_steps():
    words = [f"w{number} " for number in range(3000)]
    context = "".join(words)
    choices = EndpointChoices(
        base_url="https://a.example/v1",
        model="m",
        tokenizer=DEMO_TOKENIZER,
        prices=Prices(input=1.0, cached_input=0.1, output=10.0),
    )
    groups = [[context + "first", context + "second", context + "third"], ["short one", "short two"]]
    bill = estimate_bill(choices, groups, max_new_tokens=5)
    tokenizer = Tokenizer.from_file(f"{DEMO_TOKENIZER}/tokenizer.json")
    counts = [len(tokenizer.encode(prompt, add_special_tokens=False).ids) + 7 for group in groups for prompt in group]
    shared = len(tokenizer.encode(context, add_special_tokens=False).ids) // 128 * 128
    assert bill.spent == Spent(5, sum(counts), 2 * shared, 25)
    assert bill.cost == pytest.approx((sum(counts) - 2 * shared + 0.1 * 2 * shared + 250) / 1e6)
    assert not bill.is_estimate
    twice = estimate_bill(choices, groups, max_new_tokens=5, times=2)
    assert twice.spent.cached_tokens == 2 * shared + sum(count // 128 * 128 for count in counts[:3])
    rough = estimate_bill(EndpointChoices(base_url="https://a.example/v1", model="m"), groups, max_new_tokens=5)
    assert rough.is_estimate
    assert rough.cost is None
