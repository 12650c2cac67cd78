use std::time::SystemTime;

use tokio::time::advance;

use super::*;
use crate::keys::KeyEntry;
use crate::keys::tests::keys;

fn watched(sessions: &PageSessions, rights: PageRights) -> PageTicket {
    let token = sessions.issue_token(rights, None).unwrap();
    sessions.redeem_token(token.reveal()).unwrap().0
}

#[tokio::test(start_paused = true)]
async fn a_page_token_works_once_and_for_a_minute() {
    let sessions = PageSessions::default();
    let [once, late] = [(); 2].map(|()| sessions.issue_token(PageRights::Watch, None).unwrap());
    advance(TOKEN_LIFE - Duration::from_millis(1)).await;
    let (session, rights) = sessions.redeem_token(once.reveal()).unwrap();
    assert_eq!((rights, sessions.rights(session.reveal())), (PageRights::Watch, Some(PageRights::Watch)));
    assert!(matches!(sessions.redeem_token(once.reveal()), Err(NoSession::Token)), "a second time");
    advance(Duration::from_millis(1)).await;
    assert!(matches!(sessions.redeem_token(late.reveal()), Err(NoSession::Token)), "after its minute");
    assert_eq!(sessions.rights(once.reveal()), None, "a token is no session");
    assert!(sessions.redeem_token(session.reveal()).is_err(), "and a session no token");
}

#[tokio::test(start_paused = true)]
async fn a_page_session_lasts_twelve_hours() {
    let sessions = PageSessions::default();
    let session = watched(&sessions, PageRights::Operate);
    advance(SESSION_LIFE - Duration::from_millis(1)).await;
    assert_eq!(sessions.rights(session.reveal()), Some(PageRights::Operate));
    advance(Duration::from_millis(1)).await;
    assert_eq!(sessions.rights(session.reveal()), None);
}

#[tokio::test(start_paused = true)]
async fn the_oldest_tokens_and_sessions_make_way_for_new_ones() {
    let sessions = PageSessions::default();
    let first = sessions.issue_token(PageRights::Watch, None).unwrap();
    for _ in 0..MAX_TOKENS {
        advance(Duration::from_millis(1)).await;
        sessions.issue_token(PageRights::Watch, None).unwrap();
    }
    assert!(sessions.redeem_token(first.reveal()).is_err());
    assert_eq!(sessions.grants.lock().tokens.len(), MAX_TOKENS);
    let first = watched(&sessions, PageRights::Watch);
    for _ in 0..MAX_SESSIONS {
        advance(Duration::from_millis(1)).await;
        watched(&sessions, PageRights::Watch);
    }
    assert_eq!(sessions.rights(first.reveal()), None);
    assert_eq!(sessions.grants.lock().sessions.len(), MAX_SESSIONS);
}

#[tokio::test]
async fn a_page_session_ends_with_its_key() {
    let [admin, user] = [(); 2].map(|()| Secret::random().unwrap());
    let entry = |secret: &Secret, role| KeyEntry { role, ..KeyEntry::new(secret, "t", SystemTime::now()) };
    let known = keys(vec![entry(&admin, Role::Admin), entry(&user, Role::Use)]);
    let sessions = PageSessions::new(known.clone());
    assert!(matches!(sessions.redeem_key(user.reveal()), Err(NoSession::Role(_))));
    assert!(matches!(sessions.redeem_key("hk_nonsense"), Err(NoSession::Key(_))));
    let (session, rights) = sessions.redeem_key(admin.reveal()).unwrap();
    assert_eq!((rights, sessions.rights(session.reveal())), (PageRights::Operate, Some(PageRights::Operate)));
    let shown = Some(admin.reveal());
    let [used, unused] = [(); 2].map(|()| sessions.issue_token(PageRights::Operate, shown).unwrap());
    let (by_token, _) = sessions.redeem_token(used.reveal()).unwrap();
    known.0.as_ref().unwrap().ring.store(Arc::new(crate::keys::KeyRing::new(Vec::new())));
    assert_eq!(sessions.rights(session.reveal()), None, "the key is gone");
    assert_eq!(sessions.rights(by_token.reveal()), None, "and with it what it was asked for with");
    assert!(matches!(sessions.redeem_token(unused.reveal()), Err(NoSession::Token)));
    assert!(matches!(PageSessions::default().redeem_key(admin.reveal()), Err(NoSession::NoKeys)));
}

#[test]
fn a_page_ticket_is_never_printed() {
    let ticket = PageTicket::random().unwrap();
    assert!(ticket.reveal().len() == 64 && !format!("{ticket:?}").contains(ticket.reveal()));
}
