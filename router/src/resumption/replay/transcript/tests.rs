use super::*;

const ONE: Channel = Channel { kind: 1, index: 0 };
const OTHER: Channel = Channel { kind: 2, index: 0 };

/// A transcript with `ab` and `é` in one channel, a mark, and `c` in another channel.
fn recorded() -> (Transcript, LaneAt) {
    let mut transcript = Transcript::new(&RecordMemory::default());
    let lane = transcript.lane((0, 0)).unwrap();
    for text in ["ab", "é"] {
        assert_eq!(transcript.tell_text(lane, ONE, text), Ok(0));
    }
    assert_eq!(transcript.tell_mark(lane, 9, &["x", "y"]), Ok(false));
    assert_eq!(transcript.tell_text(lane, OTHER, "c"), Ok(0));
    transcript.rewind();
    (transcript, lane)
}

#[test]
fn repeated_text_is_recognized_in_other_pieces() {
    let (mut transcript, lane) = recorded();
    assert!(!transcript.is_told());
    assert_eq!(transcript.tell_text(lane, ONE, "a"), Ok(1));
    assert_eq!(transcript.tell_text(lane, ONE, "bé"), Ok(3));
    assert_eq!(transcript.tell_mark(lane, 9, &["x", "y"]), Ok(true));
    assert_eq!(transcript.tell_text(lane, OTHER, "cd"), Ok(1));
    assert!(transcript.is_told());
    assert_eq!(transcript.tell_text(lane, OTHER, "e"), Ok(0));
    // New pieces belong to the transcript from then on.
    transcript.rewind();
    assert_eq!(transcript.tell_text(lane, ONE, "abé"), Ok(4));
    assert_eq!(transcript.tell_mark(lane, 9, &["x", "y"]), Ok(true));
    assert_eq!(transcript.tell_text(lane, OTHER, "cdef"), Ok(3));
}

#[test]
fn any_other_text_is_a_difference() {
    let differs = |tell: &dyn Fn(&mut Transcript, LaneAt) -> bool| {
        let (mut transcript, lane) = recorded();
        tell(&mut transcript, lane)
    };
    assert!(differs(&|transcript, lane| transcript.tell_text(lane, ONE, "ax").is_err()));
    assert!(differs(&|transcript, lane| transcript.tell_text(lane, OTHER, "ab").is_err()));
    assert!(differs(&|transcript, lane| transcript.tell_mark(lane, 9, &["x", "y"]).is_err()));
    // More text in a channel than the first stream had before its next piece.
    assert!(differs(&|transcript, lane| transcript.tell_text(lane, ONE, "abéz").is_err()));
    let after_text = |parts: &[&str]| {
        let (mut transcript, lane) = recorded();
        transcript.tell_text(lane, ONE, "abé").unwrap();
        transcript.tell_mark(lane, 9, parts)
    };
    assert_eq!(after_text(&["x", "y"]), Ok(true));
    assert_eq!(after_text(&["x"]), Err(Difference));
    assert_eq!(after_text(&["xy"]), Err(Difference));
}

#[test]
fn a_character_is_not_split() {
    let mut transcript = Transcript::new(&RecordMemory::default());
    let lane = transcript.lane((0, 0)).unwrap();
    transcript.tell_text(lane, ONE, "a\u{1f980}").unwrap();
    transcript.rewind();
    assert_eq!(transcript.tell_text(lane, ONE, "a\u{1f981}"), Err(Difference));
}

#[test]
fn a_transcript_without_room_is_dropped() {
    let memory = RecordMemory::with_bound(1000);
    let mut transcript = Transcript::new(&memory);
    let lane = transcript.lane((0, 0)).unwrap();
    transcript.tell_text(lane, ONE, &"x".repeat(300)).unwrap();
    assert!(transcript.is_whole());
    transcript.tell_text(lane, ONE, &"x".repeat(320)).unwrap();
    assert!(!transcript.is_whole());
    drop(transcript);
    assert_eq!(memory.taken(), 0);
}
