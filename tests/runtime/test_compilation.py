import logging

import torch

from recsys_tpu.runtime.compilation import CompileWatch, _cause, compile_for


def _steps(watch, function, inputs):
    return [bool((function(x), watch.step_done())[1]) for x in inputs]


def test_only_compilations_after_the_warm_up_are_reported_with_their_cause(caplog):
    watch = CompileWatch(warmup_steps=2)
    double = compile_for("cpu", lambda x: x * 2)
    with caplog.at_level(logging.WARNING):
        reported = _steps(watch, double, [torch.ones(4), torch.ones(5), torch.ones(4), torch.ones(6)])
    assert reported == [False, False, False, True]
    assert [c.cause for c in watch.warmup] == ["first", "shape"]
    (late,) = watch.after_warmup
    assert (late.step, late.cause) == (4, "shape") and "expected 4, actual 6" in late.detail
    assert "compilation after warm-up" in caplog.text
    assert watch.first_step_compile_s > 0


def test_dtype_is_told_from_shape():
    watch = CompileWatch(warmup_steps=1)
    triple = compile_for("cpu", lambda x: x * 3)
    _steps(watch, triple, [torch.ones(4), torch.ones(4, dtype=torch.float64)])
    assert [c.cause for c in watch.after_warmup] == ["dtype"]
    assert _cause("___check_type_id(x)") == "guard"


def test_a_graph_break_is_reported_with_its_reason():
    watch = CompileWatch(warmup_steps=1)

    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    function = compile_for("cpu", breaks)
    _steps(watch, function, [torch.ones(2)])
    assert "graph break" in [c.cause for c in watch.warmup]


def test_device_programs_without_a_dynamo_compilation_are_reported():
    programs = ["old"]
    watch = CompileWatch(warmup_steps=1, compiled_programs=lambda since: programs[since:])
    assert watch.step_done() == []
    programs += ["cumsum", "add"]
    (found,) = watch.step_done()
    assert found.cause == "device program" and found.detail.endswith(": cumsum, add")
    assert watch.step_done() == []
