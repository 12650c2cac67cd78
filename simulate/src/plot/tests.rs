use super::*;
use crate::report::tests::outcome;

#[test]
fn a_plot_has_one_labelled_bar_for_each_policy() {
    let text = svg(&[outcome("one ×1.5", "hostler", 0.5), outcome("one ×1.5", "a<b", 5.0), outcome("two", "hostler", 0.0)]);
    assert_eq!(text.matches("rx=\"2\"").count(), 3);
    assert!(text.contains(">one ×1.5</text>") && text.contains(">a&lt;b</text>") && !text.contains("NaN"));
    assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
}

#[test]
fn plot_ticks_are_round_and_few() {
    for most in [0.003, 0.19, 1.0, 7.05, 84.9, 699.0] {
        let count = most / tick(most);
        assert!((4.0..=10.0).contains(&count), "{count} ticks up to {most}");
    }
    assert_eq!((tick(0.0), number(0.5), number(20.0)), (0.0, "0.5".to_owned(), "20".to_owned()));
}
