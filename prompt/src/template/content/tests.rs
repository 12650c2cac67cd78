//! Tests of the shape that a template expects.

use super::*;

fn shape(source: &str) -> ContentShape {
    ContentShape::of(source).unwrap()
}

#[test]
fn a_template_that_prints_content_gets_a_text() {
    assert_eq!(shape("{% for message in messages %}{{ message.content }}{% endfor %}"), ContentShape::Text);
    assert_eq!(shape("{% for message in messages %}{{ message['content'] | trim }}{% endfor %}"), ContentShape::Text);
    assert_eq!(shape("{% for message in messages %}{% for call in message.tool_calls %}{% endfor %}{% endfor %}"), ContentShape::Text);
    assert_eq!(shape("nothing"), ContentShape::Text);
}

#[test]
fn a_template_that_iterates_over_content_gets_parts() {
    for source in [
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for part in m['content'] | list %}{% endfor %}{% endfor %}",
        "{% set rest = messages %}{% set rest = rest[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{% else %}{% for p in m.content if p.text %}{% endfor %}{% endif %}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
    ] {
        assert_eq!(shape(source), ContentShape::Parts, "{source}");
    }
}

#[test]
fn a_macro_that_iterates_over_content_gets_parts() {
    let template = |argument: &str| {
        format!(
            "{{% macro show(a, b) %}}{{% for p in b %}}{{% endfor %}}{{% endmacro %}}{{% for m in messages %}}{{{{ show(1, {argument}) }}}}{{% endfor %}}"
        )
    };
    assert_eq!(shape(&template("m.content")), ContentShape::Parts);
    assert_eq!(shape(&template("b=m['content']")), ContentShape::Parts);
    assert_eq!(shape(&template("m.tool_calls")), ContentShape::Text);
    // A parameter named content that never gets one does not count, as in engines.
    assert_eq!(shape("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"), ContentShape::Text);
}

#[test]
fn a_loop_over_a_conditional_is_not_detected() {
    let source = "{% for m in (messages if true else []) %}{% for p in m.content %}{% endfor %}{% endfor %}";
    assert_eq!(shape(source), ContentShape::Text);
}

#[test]
fn an_assigned_field_disables_the_detection_of_parts() {
    let source =
        "{% set ns = namespace() %}{% set ns.all = messages %}{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}";
    assert_eq!(shape(source), ContentShape::Text);
}
