use std::future::poll_fn;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};

use super::*;

/// A connection as the library has it, and its client, which buffers little before it reads.
async fn connection() -> (ClientStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpSocket::new_v4().unwrap();
    client.set_recv_buffer_size(4096).unwrap();
    let address = listener.local_addr().unwrap();
    let (client, accepted) = tokio::join!(client.connect(address), listener.accept());
    let server = accepted.unwrap().0;
    server.writable().await.unwrap();
    (ClientStream::new(Stream::Plain(server)), client.unwrap())
}

async fn flush(wire: &mut ClientStream) {
    poll_fn(|context| Pin::new(&mut *wire).poll_flush(context)).await.unwrap();
}

#[tokio::test]
async fn a_direct_writer_is_idle_between_flush_and_next_write() {
    let (mut wire, mut client) = connection().await;
    let direct_writer = wire.direct_writer().unwrap();
    assert!(direct_writer.try_acquire().is_none(), "the head of the answer is still to come");
    wire.write_all(b"head").await.unwrap();
    assert!(direct_writer.try_acquire().is_none());
    flush(&mut wire).await;
    assert!(direct_writer.try_acquire().unwrap().write_chunk(b"hello, ", b"world"));
    assert!(direct_writer.try_acquire().unwrap().write_chunk(&[b'x'; MAX_COPIED_BYTES], b""));
    direct_writer.mark_busy();
    assert!(direct_writer.try_acquire().is_none());
    wire.write_all(b"end").await.unwrap();
    let mut received = [0; 4 + 17 + 5 + MAX_COPIED_BYTES + 2 + 3];
    client.read_exact(&mut received).await.unwrap();
    let expected = [b"headC\r\nhello, world\r\n400\r\n", &[b'x'; MAX_COPIED_BYTES][..], b"\r\nend"].concat();
    assert_eq!(received[..], expected[..]);
}

#[tokio::test]
async fn unsent_bytes_go_before_everything_that_follows() {
    let (mut wire, mut client) = connection().await;
    let direct_writer = wire.direct_writer().unwrap();
    flush(&mut wire).await;
    let mut expected = Vec::new();
    for size in (1..).map(|number| number * 997 % 20_000 + 1) {
        let chunk = vec![u8::try_from(size % 251).unwrap(); size];
        expected.extend_from_slice(&[format!("{size:X}\r\n").as_bytes(), &chunk, b"\r\n"].concat());
        if !direct_writer.try_acquire().unwrap().write_chunk(&chunk, b"") {
            break;
        }
    }
    assert!(direct_writer.try_acquire().is_none(), "nothing may come between the parts of a chunk");
    expected.extend_from_slice(b"the library's own");
    let mut received = vec![0; expected.len()];
    let (_, written) = tokio::join!(client.read_exact(&mut received), async {
        wire.write_all(b"the library's own").await?;
        wire.flush().await
    });
    written.unwrap();
    assert!(received == expected);
    assert!(direct_writer.try_acquire().is_some());
}

#[tokio::test]
async fn a_flush_ends_when_the_client_has_taken_the_rest() {
    let (mut wire, mut client) = connection().await;
    let direct_writer = wire.direct_writer().unwrap();
    flush(&mut wire).await;
    while direct_writer.try_acquire().unwrap().write_chunk(&[b'x'; 60_000], b"") {}
    let mut context = Context::from_waker(std::task::Waker::noop());
    assert!(Pin::new(&mut wire).poll_flush(&mut context).is_pending());
    assert!(direct_writer.try_acquire().is_none());
    let read = tokio::spawn(async move {
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.map(|_| all)
    });
    wire.flush().await.unwrap();
    assert!(direct_writer.try_acquire().unwrap().write_chunk(b"next", b""));
    wire.shutdown().await.unwrap();
    assert!(read.await.unwrap().unwrap().ends_with(b"x\r\n4\r\nnext\r\n"));
}

#[tokio::test]
async fn the_connections_task_notices_that_its_client_is_gone() {
    let (mut wire, client) = connection().await;
    let direct_writer = wire.direct_writer().unwrap();
    flush(&mut wire).await;
    drop(client);
    while direct_writer.try_acquire().unwrap().write_chunk(b"event", b"") {
        tokio::task::yield_now().await;
    }
    assert!(wire.flush().await.is_err());
}

#[tokio::test]
async fn hyper_reads_all_bytes_and_then_the_end() {
    let (mut wire, mut client) = connection().await;
    client.write_all(b"request").await.unwrap();
    let mut read = [0; 64];
    assert_eq!(wire.read(&mut read).await.unwrap(), 7);
    let (again, _) = tokio::join!(wire.read(&mut read), client.write_all(b"another"));
    assert_eq!(again.unwrap(), 7);
    drop(client);
    assert_eq!(wire.read(&mut read).await.unwrap(), 0);
}
