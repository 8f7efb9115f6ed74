from __future__ import annotations

import math

import pytest

from gpuworker.errors import InvalidRequest
from gpuworker.runner.params import Feature, check_sampling, features_of
from gpuworker.step import SamplingParams

VOCAB = 128


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(temperature=1e39), "temperature"),
        (SamplingParams(top_k=-2), "top_k"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=1.01), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(min_p=1.1), "min_p"),
        (SamplingParams(min_p=math.nan), "min_p"),
        (SamplingParams(seed=-1), "seed"),
        (SamplingParams(seed=2**64), "seed"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.nan), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.inf), "repetition_penalty"),
        (SamplingParams(presence_penalty=2.1), "presence_penalty"),
        (SamplingParams(presence_penalty=math.nan), "presence_penalty"),
        (SamplingParams(frequency_penalty=-2.1), "frequency_penalty"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(logprobs=-1), "logprobs"),
        (SamplingParams(logprobs=6), "max_logprobs=5"),
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias holds token id 128"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias holds token id -1"),
        (SamplingParams(logit_bias={2**31: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={0: math.inf}), "logit_bias"),
        (SamplingParams(logit_bias={0: -math.inf}), "logit_bias"),
        (SamplingParams(logit_bias={0: math.nan}), "logit_bias"),
        (SamplingParams(logit_bias={0: 1e39}), "logit_bias"),
        (SamplingParams(allowed_token_ids=(0, VOCAB)), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(-1,)), "allowed_token_ids"),
        (SamplingParams(stop_token_ids=(VOCAB,)), "stop_token_ids"),
        (SamplingParams(bad_token_ids=((1, VOCAB),)), "bad_token_ids"),
        (SamplingParams(bad_token_ids=((),)), "bad_token_ids"),
    ],
)
def test_value_out_of_range_is_refused_by_name(params: SamplingParams, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_sampling(params, vocab_size=VOCAB, max_logprobs=5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=-1, top_p=1e-9, min_p=1.0, seed=2**64 - 1),
        SamplingParams(top_k=10**7, presence_penalty=-2.0, frequency_penalty=2.0),
        SamplingParams(logprobs=5, logit_bias={0: -100.0, VOCAB - 1: 100.0}),
        SamplingParams(min_tokens=3, stop_token_ids=(0,), bad_token_ids=((1,), (1, 2))),
    ],
)
def test_value_at_its_limit_is_accepted(params: SamplingParams) -> None:
    check_sampling(params, vocab_size=VOCAB, max_logprobs=5)


@pytest.mark.parametrize(
    ("params", "features"),
    [
        (SamplingParams(temperature=0.0), Feature(0)),
        (SamplingParams(temperature=9e-6, top_p=0.5, top_k=3, min_p=0.1), Feature(0)),
        (SamplingParams(top_k=1, top_p=0.5), Feature(0)),
        (SamplingParams(), Feature.RANDOM),
        (SamplingParams(top_k=VOCAB), Feature.RANDOM),
        (SamplingParams(top_k=VOCAB - 1), Feature.RANDOM | Feature.TOP_K),
        (SamplingParams(top_p=0.9, min_p=0.1), Feature.RANDOM | Feature.TOP_P | Feature.MIN_P),
        (SamplingParams(temperature=0.0, min_tokens=2), Feature(0)),
        (SamplingParams(temperature=0.0, logprobs=0), Feature.LOGPROBS),
    ],
)
def test_only_effective_parameters_become_features(
    params: SamplingParams, features: Feature
) -> None:
    assert features_of(params, VOCAB) == features
