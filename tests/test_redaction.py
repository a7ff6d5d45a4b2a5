"""Secrets that a log or a bundle could carry, and look-alikes that must stay."""

from __future__ import annotations

import time

import pytest

from recsys_tpu.redaction import redact, redact_values, told_environment

SECRETS = {
    "a URL with a password": ("read gs://me:hunter2@bucket/x", "hunter2"),
    "a token of GitHub": ("clone https://ghp_0123456789abcdefghijABCDEFGHIJ012345@github.com/x", "ghp_"),
    "an option": ("train run.api-key=sesame train.max_steps=3", "sesame"),
    "an environment variable": ("AWS_SECRET_ACCESS_KEY=abc/def+1 RANK=0", "abc/def"),
    "YAML": ("storage:\n  password: hunter2\n", "hunter2"),
    "JSON": ('{"access_key": "sesame", "steps": 3}', "sesame"),
    "JSON in JSON": (r'{"argv": "{\"token\": \"sesame\"}"}', "sesame"),
    "a header": ("Authorization: Bearer abcdefgh12345678", "abcdefgh"),
    "a web token": ("cookie eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2ln", "eyJ"),
    "a key of AWS": ("key AKIAIOSFODNN7EXAMPLE", "AKIA"),
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\n", "MIIE"),
    "a private key, cut": ("-----BEGIN PRIVATE KEY-----\nMIIE", "MIIE"),
}


@pytest.mark.parametrize("case", SECRETS)
def test_a_secret_is_hidden(case):
    text, secret = SECRETS[case]
    assert secret in text and secret not in redact(text) and "[hidden]" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "step 100 loss 0.41589 samples/s 14,386",
        "tokens: 5, tokenizer=bpe, author: Bob",
        "gs://bucket/data:1/part-00001@v2.parquet",
        "table t_C1: 10 rows; gloo:all_to_all [2048] of group 0",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_redacting_twice_changes_nothing():
    for text, _ in SECRETS.values():
        assert redact(redact(text)) == redact(text)


def test_values_under_a_secret_name_are_hidden_whole():
    assert redact_values({"auth_token": ["a", 1], "list": [{"password": 3}], "x": None}) == {
        "auth_token": "[hidden]",
        "list": [{"password": "[hidden]"}],
        "x": None,
    }


def test_the_environment_is_told_by_name_only():
    found = told_environment(
        {
            "OMP_NUM_THREADS": "1",
            "RANK": "3",
            "TPU_TOKEN": "x",
            "HF_TOKEN": "x",
            "HOME": "/root",
            "MY_KEY": "x",
        }
    )
    assert found == {"OMP_NUM_THREADS": "1", "RANK": "3", "TPU_TOKEN": "[hidden]"}


@pytest.mark.parametrize(
    "text", ["a." * 50_000, "token" * 20_000, "a:" * 50_000, "x://" * 20_000, "-eyJ" * 20_000]
)
def test_long_lines_take_no_time(text):
    started = time.perf_counter()
    redact(text)
    assert time.perf_counter() - started < 5
