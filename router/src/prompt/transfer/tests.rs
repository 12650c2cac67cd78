use super::*;
use proptest::prelude::*;

fn piece(offset: u64, data: &[u8]) -> FilesPiece {
    FilesPiece { offset, content: Ok(data.to_vec().into()) }
}

#[test]
fn a_misplaced_piece_breaks_the_transfer() {
    let now = Instant::now();
    let mut transfer = Transfer::new(10, now);
    assert_eq!(transfer.append(piece(0, b"abc"), now), Ok(false));
    for offset in [0, 2, 4, u64::MAX] {
        assert_eq!(transfer.append(piece(offset, b"d"), now), Err(TransferError::Gap { offset, expected: 3 }));
    }
}

#[test]
fn excess_and_empty_pieces_break_the_transfer() {
    let now = Instant::now();
    let mut transfer = Transfer::new(4, now);
    assert_eq!(transfer.append(piece(0, b"abcde"), now), Err(TransferError::Length { bytes: 4 }));
    assert_eq!(transfer.append(piece(0, b""), now), Err(TransferError::Length { bytes: 4 }));
}

#[test]
fn an_agent_without_the_files_says_why() {
    let now = Instant::now();
    let refusal = FilesPiece { offset: 0, content: Err("no replica has them".into()) };
    assert_eq!(Transfer::new(4, now).append(refusal, now), Err(TransferError::Refused("no replica has them".into())));
}

#[test]
fn a_transfer_stalls_ten_seconds_after_its_last_piece() {
    let begun = Instant::now();
    let mut transfer = Transfer::new(4, begun);
    let heard = begun + Duration::from_secs(9);
    transfer.append(piece(0, b"a"), heard).unwrap();
    assert!(!transfer.has_stalled(heard + Duration::from_millis(9_999)));
    assert!(transfer.has_stalled(heard + Duration::from_secs(10)));
}

proptest! {
    #[test]
    fn pieces_of_any_size_give_the_bundle(content in prop::collection::vec(any::<u8>(), 1..2000), size in 1usize..700) {
        let now = Instant::now();
        let mut transfer = Transfer::new(content.len(), now);
        let mut offset = 0;
        for data in content.chunks(size) {
            let last = transfer.append(piece(offset, data), now).unwrap();
            offset += data.len() as u64;
            prop_assert_eq!(last, offset == content.len() as u64);
        }
        prop_assert_eq!(transfer.into_content(), content);
    }
}
