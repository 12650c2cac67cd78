use super::*;

#[test]
fn a_walltime_is_given_as_for_schedulers_or_with_units() {
    for (text, seconds) in
        [("2:00:00", 7200), ("02:00:00", 7200), ("0:10:00", 600), ("120:00:01", 432_001), ("2h", 7200), ("1h 30m", 5400), ("90s", 90)]
    {
        assert_eq!(parse_walltime(text), Ok(Duration::from_secs(seconds)), "{text}");
    }
}

#[test]
fn an_ambiguous_walltime_is_refused_with_the_accepted_forms() {
    for text in ["", "2:00", "7200", "2:60:00", "2:00:60", "-1:00:00", "+1:00:00", "1:2:3:4", "1::0", "9999999:00:00", "2 hours:0:0", "two"]
    {
        assert_eq!(parse_walltime(text), Err(FORMS.to_owned()), "{text}");
    }
}
