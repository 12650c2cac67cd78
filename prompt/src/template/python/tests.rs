//! Tests of the dates and numbers that templates write.
//!
//! The tests of templates compare the rest with the library.

use serde_json::{Map, json};

use super::super::{Template, strftime::strftime};

#[test]
fn dates_are_formatted_like_pythons_strftime() {
    let moment = 1_709_210_096; // 2024-02-29 12:34:56
    assert_eq!(strftime("%d %b %Y", moment), "29 Feb 2024");
    assert_eq!(
        strftime("%A, %B %-d, %y; %H:%M:%S %I %p %j %e %a %m %%", moment),
        "Thursday, February 29, 24; 12:34:56 12 PM 060 29 Thu 02 %"
    );
    assert_eq!(strftime("%Y-%m-%d %H", 0), "1970-01-01 00");
    assert_eq!(strftime("%F %T %j", 1_735_689_599), "2024-12-31 23:59:59 366");
    assert_eq!(strftime("%F %A", -1), "1969-12-31 Wednesday");
    assert_eq!(strftime("%Q %", moment), "%Q %");
}

#[test]
fn todays_date_has_the_requested_format() {
    let template = Template::new("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    let date = template.render(&Map::new()).unwrap();
    assert_eq!(date.len(), 10, "{date}");
    assert!(date.as_str() > "2024-01-01", "{date}");
}

#[test]
fn an_endless_template_is_stopped() {
    let template =
        Template::new("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(99) %}{% endfor %}{% endfor %}{% endfor %}");
    assert!(template.unwrap().render(&Map::new()).is_err());
}

#[test]
fn a_value_that_cannot_be_json_is_refused() {
    let template = Template::new("{{ nothing|tojson }}").unwrap();
    assert!(template.render(&Map::new()).is_err());
    let deep = (0..100).fold(json!(1), |value, _| json!([value]));
    let template = Template::new("{{ deep|tojson|length }}").unwrap();
    let variables: Map<_, _> = [("deep".to_owned(), deep)].into_iter().collect();
    assert_eq!(template.render(&variables).unwrap(), "201");
}
