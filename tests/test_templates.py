"""Chat templates: what they may call, what they do not see, and that one that fails harms nothing."""

from __future__ import annotations

import pytest

from akv_server.errors import AkvError
from tests.chats import ANSWER, USER, with_template


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ nothing.there.at.all }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(default_tokenizer, template):
    with pytest.raises(AkvError) as refused:
        with_template(default_tokenizer, template).render([USER])
    assert (refused.value.code, refused.value.param) == ("invalid_request", "messages")


def test_a_broken_or_missing_template(default_tokenizer):
    with pytest.raises(AkvError, match="broken") as refused:
        with_template(default_tokenizer, "{% for %}")
    assert refused.value.param == "model"
    with pytest.raises(AkvError, match="no chat template"):
        with_template(default_tokenizer, None).render([USER])


def test_what_templates_may_call(default_tokenizer):
    template = (
        "{%- generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}{{ {'é': [1]} | tojson }}"
        "{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    )
    rendered = with_template(default_tokenizer, template).render([USER, ANSWER])
    assert rendered.text == '4{"é": [1]}Two, 357 bytes.'


def test_what_a_message_says_to_policies_is_not_shown_to_the_template(default_tokenizer):
    chat = with_template(default_tokenizer, "{% for message in messages %}{{ message | tojson }}\n{% endfor %}")
    said = {"akv": {"ephemeral": True, "keep_head": 3}, "tags": ["keep_output"], "is_demo": False}
    assert chat.render([{**USER, **said}], add_generation_prompt=False).text == chat.render([USER]).text
    for akv, param in (({"keep_head": -1}, "messages[0].akv.keep_head"), ({"x": 1}, "messages[0].akv.x")):
        with pytest.raises(AkvError) as refused:
            chat.render([{**USER, "akv": akv}])
        assert refused.value.param == param
