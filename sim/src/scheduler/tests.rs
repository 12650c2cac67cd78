//! Tests of the step decisions, without any clock.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;

use super::*;
use crate::mailbox::{Delta, Mailbox};
use crate::tokens::Continuation;

const BLOCK: usize = 4;

fn scheduler(sequences: usize, batched_tokens: usize, blocks: usize) -> Scheduler {
    Scheduler::new(Limits { sequences, batched_tokens, block_size: BLOCK, blocks, host_blocks: 0, kv_events: true })
}

fn sequence(prompt: &[u32], tokens: usize) -> (Sequence, Arc<Mailbox>) {
    salted(prompt, tokens, None)
}

fn salted(prompt: &[u32], tokens: usize, salt: Option<&str>) -> (Sequence, Arc<Mailbox>) {
    let mailbox = Arc::new(Mailbox::new(1));
    let limit = Limit { tokens, finish: Finish::Length };
    let continuation = Continuation::after(0, prompt);
    let sequence = Sequence::new(mailbox.clone(), 0, prompt.to_vec(), limit, continuation);
    (sequence.with_hashes(BLOCK, salt.map(str::to_owned), None), mailbox)
}

fn prompt(length: u32) -> Vec<u32> {
    (0..length).collect()
}

/// Deltas that have arrived in a mailbox.
fn taken(mailbox: &Mailbox) -> Vec<Delta> {
    let mut deltas = Vec::new();
    let _ = mailbox.poll_deltas(&mut Context::from_waker(Waker::noop()), &mut deltas);
    deltas
}

fn run_to_end(scheduler: &mut Scheduler) {
    for _ in 0..10_000 {
        if scheduler.is_idle() {
            return;
        }
        scheduler.plan();
        scheduler.commit();
    }
    panic!("the sequences do not end");
}

#[test]
fn blocks_that_have_left_the_gpu_are_loaded_from_the_host() {
    let limits = Limits { sequences: 4, batched_tokens: 100, block_size: BLOCK, blocks: 6, host_blocks: 100, kv_events: true };
    let mut scheduler = Scheduler::new(limits);
    let (first, other): (Vec<u32>, Vec<u32>) = ((0..18).collect(), (100..120).collect());
    for tokens in [&first, &other] {
        scheduler.add(sequence(tokens, 1).0);
        run_to_end(&mut scheduler);
    }
    let events = scheduler.take_events();
    let on_host = |event: &&Event| matches!(event, Event::BlockStored { medium: Some(medium), extra_keys: None, .. } if medium == "CPU");
    assert_eq!(events.iter().filter(on_host).count(), 4 + 5);
    // The other prompt has left one of the first one's four blocks on the GPU.
    let (again, mailbox) = sequence(&first, 1);
    scheduler.add(again);
    assert_eq!(scheduler.plan(), Step { prefill_tokens: 2, loaded_tokens: 3 * BLOCK, decodes: 0 });
    run_to_end(&mut scheduler);
    assert_eq!(mailbox.cached_tokens(), 4 * BLOCK);
    let is_on_gpu = |event: &Event| matches!(event, Event::BlockStored { medium: Some(medium), .. } if medium == "GPU");
    assert!(scheduler.take_events().iter().any(is_on_gpu), "loaded blocks are on the GPU again");
}

#[test]
fn a_prompt_is_prefilled_then_decoded_token_by_token() {
    let mut scheduler = scheduler(4, 100, 100);
    let (sequence, mailbox) = sequence(&prompt(10), 3);
    scheduler.add(sequence);
    assert_eq!(scheduler.plan(), Step { prefill_tokens: 10, ..Step::default() });
    scheduler.commit();
    assert_eq!(taken(&mailbox)[0].tokens.len(), 1);
    assert_eq!(scheduler.plan(), Step { decodes: 1, ..Step::default() });
    scheduler.commit();
    scheduler.plan();
    scheduler.commit();
    let last = taken(&mailbox);
    assert_eq!((last[0].tokens.len(), last[0].finish), (2, Some(Finish::Length)), "untaken tokens merge");
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.cache_usage(), 0.0);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_running_sequences() {
    let mut scheduler = scheduler(4, 16, 100);
    scheduler.add(sequence(&prompt(3), 50).0);
    scheduler.plan();
    scheduler.commit();
    let (long, mailbox) = sequence(&(100..140).collect::<Vec<_>>(), 5);
    scheduler.add(long);
    let steps: Vec<Step> = (0..3)
        .map(|_| {
            let step = scheduler.plan();
            scheduler.commit();
            step
        })
        .collect();
    let prefills: Vec<_> = steps.iter().map(|step| (step.prefill_tokens, step.decodes)).collect();
    assert_eq!(prefills, [(15, 1), (15, 1), (10, 1)]);
    assert_eq!(taken(&mailbox)[0].tokens.len(), 1, "its first token comes with its last chunk");
}

#[test]
fn no_more_sequences_run_than_allowed() {
    let mut scheduler = scheduler(2, 100, 100);
    for _ in 0..5 {
        scheduler.add(sequence(&prompt(3), 4).0);
    }
    scheduler.plan();
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 3));
    scheduler.commit();
    run_to_end(&mut scheduler);
    assert_eq!(scheduler.take_counters().finished.len(), 5);
}

#[test]
fn a_shared_prefix_is_not_computed_again() {
    let mut scheduler = scheduler(4, 100, 100);
    scheduler.add(sequence(&prompt(12), 1).0);
    run_to_end(&mut scheduler);
    let (again, mailbox) = sequence(&prompt(12), 1);
    scheduler.add(again);
    // The last block is computed again, because its last token decides the next one.
    assert_eq!(scheduler.plan().prefill_tokens, 4);
    assert_eq!(mailbox.cached_tokens(), 8);
    scheduler.commit();
    let tally = scheduler.take_counters();
    assert_eq!((tally.queried_tokens, tally.cached_tokens), (24, 8));
    scheduler.add(salted(&prompt(12), 1, Some("tenant")).0);
    assert_eq!(scheduler.plan().prefill_tokens, 12, "a salt shares nothing");
}

#[test]
fn a_full_cache_preempts_the_youngest_and_everything_still_ends() {
    let mut scheduler = scheduler(4, 100, 6);
    let (first, first_mailbox) = sequence(&prompt(8), 16);
    let (second, second_mailbox) = sequence(&(50..58).collect::<Vec<_>>(), 16);
    scheduler.add(first);
    scheduler.add(second);
    run_to_end(&mut scheduler);
    let tally = scheduler.take_counters();
    assert!(tally.preemptions > 0);
    assert_eq!(tally.finished, [Finish::Length; 2]);
    assert_eq!((tally.prompt_tokens, tally.generated_tokens), (16, 32), "nothing is counted twice");
    assert_eq!(taken(&first_mailbox)[0].tokens.len(), 16);
    assert_eq!(taken(&second_mailbox)[0].tokens.len(), 16);
}

#[test]
fn events_describe_stored_decoded_and_removed_blocks() {
    let mut scheduler = scheduler(1, 100, 3);
    scheduler.add(salted(&prompt(6), 3, Some("tenant")).0);
    run_to_end(&mut scheduler);
    let events = scheduler.take_events();
    let [Event::BlockStored { block_hashes, token_ids, extra_keys, .. }, second] = &events[..] else {
        panic!("two blocks are stored, one of them by decoding: {events:?}");
    };
    assert_eq!(token_ids, &[0, 1, 2, 3]);
    assert_eq!(extra_keys.as_ref().unwrap()[0].as_deref(), Some(&["tenant".to_owned()][..]));
    let Event::BlockStored { parent_block_hash, extra_keys, .. } = second else { panic!("{second:?}") };
    assert_eq!(*parent_block_hash, Some(block_hashes[0]));
    assert_eq!(extra_keys.as_deref(), Some(&[None][..]));

    scheduler.add(sequence(&(70..82).collect::<Vec<_>>(), 1).0);
    scheduler.plan();
    let events = scheduler.take_events();
    assert_eq!(events.iter().filter(|event| matches!(event, Event::BlockRemoved { .. })).count(), 2);
    scheduler.reset_cache();
    assert!(scheduler.take_events().is_empty(), "blocks in use are not reset");
    scheduler.commit();
    scheduler.reset_cache();
    assert_eq!(scheduler.take_events(), [Event::AllBlocksCleared]);
}

#[test]
fn cancelled_sequences_leave_with_the_next_plan() {
    let mut scheduler = scheduler(1, 100, 100);
    let (running, running_mailbox) = sequence(&prompt(8), 100);
    let (waiting, waiting_mailbox) = sequence(&prompt(8), 100);
    scheduler.add(running);
    scheduler.add(waiting);
    scheduler.plan();
    running_mailbox.cancel();
    waiting_mailbox.cancel();
    scheduler.commit();
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.cache_usage(), 0.0);
}

proptest! {
    #[test]
    fn any_load_that_fits_ends_and_frees_its_blocks(
        requests in prop::collection::vec((1..40_u32, 1..40_usize, any::<bool>()), 1..20),
        sequences in 1..6_usize,
        batched_tokens in 1..64_usize,
        blocks in 20..40_usize,
    ) {
        let mut scheduler = scheduler(sequences, batched_tokens, blocks);
        let mut mailboxes = Vec::new();
        for (length, tokens, leaves) in &requests {
            let (sequence, mailbox) = sequence(&prompt(*length), *tokens);
            scheduler.add(sequence);
            mailboxes.push((mailbox, *tokens, *leaves));
        }
        scheduler.plan();
        scheduler.commit();
        for (mailbox, ..) in mailboxes.iter().filter(|(_, _, leaves)| *leaves) {
            mailbox.cancel();
        }
        run_to_end(&mut scheduler);
        prop_assert_eq!(scheduler.cache_usage(), 0.0);
        for (mailbox, tokens, _) in mailboxes.iter().filter(|(_, _, leaves)| !*leaves) {
            let deltas = taken(mailbox);
            prop_assert_eq!(deltas[0].tokens.len(), *tokens);
        }
    }
}

#[tokio::test]
async fn a_mailbox_wakes_its_reader() {
    let mailbox = Arc::new(Mailbox::new(1));
    let reader = tokio::spawn({
        let mailbox = mailbox.clone();
        async move {
            let mut deltas = Vec::new();
            poll_fn(|context| -> Poll<()> { mailbox.poll_deltas(context, &mut deltas) }).await;
            deltas
        }
    });
    tokio::task::yield_now().await;
    mailbox.push(0, 5, true, None);
    assert_eq!(reader.await.unwrap(), [Delta { choice: 0, tokens: vec![5], finish: None }]);
}
