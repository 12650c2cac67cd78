//! Passes open files to another process over a Unix socket. A router's listening sockets reach its
//! successor this way.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Most files that are sent together.
const MAX_FILES: usize = 8;

/// Sends open files. They travel with one byte, because the kernel sends none without data.
///
/// # Errors
/// When the other side is gone, or there are more than eight files.
pub async fn send_files(stream: &UnixStream, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sendmsg(stream, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    };
    stream.async_io(Interest::WRITABLE, send).await
}

/// Receives the files of one `send_files`. Child processes do not inherit them.
///
/// # Errors
/// When the other side is gone.
pub async fn receive_files(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let receive = || {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        Ok(files.flatten().collect())
    };
    stream.async_io(Interest::READABLE, receive).await
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::fd::AsFd;

    use super::*;

    #[tokio::test]
    async fn a_passed_listener_accepts_connections_that_waited_before() {
        let (here, there) = UnixStream::pair().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let waiting = std::net::TcpStream::connect(address).unwrap();
        send_files(&here, &[listener.as_fd()]).await.unwrap();
        drop(listener);
        let files = receive_files(&there).await.unwrap();
        let [passed] = <[OwnedFd; 1]>::try_from(files).unwrap();
        let (_, peer) = TcpListener::from(passed).accept().unwrap();
        assert_eq!(peer, waiting.local_addr().unwrap());
        drop(here);
        assert_eq!(receive_files(&there).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
