//! Finds the user at the other end of a TCP connection within this host, as the kernel knows it.
//! Loopback listeners need it, because every user of the host can reach them.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP, TCP_ESTABLISHED};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use parking_lot::Mutex;

/// Held while `/proc/net/tcp` is read. The table has a line for each connection of the host, and
/// readers would otherwise take every thread.
static TABLE: Mutex<()> = Mutex::new(());

/// The user of the program whose connection goes from `peer` to `local`; `None` if there is no such
/// connection. Only a connection that is open in both directions surely has a user: one whose
/// program has gone shows root. Blocks, for long only on kernels without sock_diag(7).
///
/// # Errors
/// If the kernel shows neither the connection nor its table of connections.
pub fn peer_user(peer: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    let (peer, local) = (canonical(peer), canonical(local));
    // A kernel without the module answers as if there were no such connection.
    match ask_kernel(peer, local) {
        Ok(Some(user)) => Ok(Some(user)),
        Ok(None) | Err(_) => read_table((peer, local)),
    }
}

/// Asks for this one connection, by sock_diag(7).
fn ask_kernel(peer: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    let socket_id = SocketId {
        source_port: peer.port(),
        destination_port: local.port(),
        source_address: peer.ip(),
        destination_address: local.ip(),
        interface_id: 0,
        cookie: [0xff; 8],
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST;
    let request = SockDiagMessage::InetRequest(InetRequest {
        family: if peer.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::ESTABLISHED,
        socket_id,
    });
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let kernel = netlink_sys::SocketAddr::new(0, 0);
    let socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.connect(&kernel)?;
    socket.send(&bytes, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<SockDiagMessage>::deserialize(&answer).map_err(io::Error::other)?;
    let NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(found)) = answer.payload else { return Ok(None) };
    let found = found.header;
    // In place of a connection the kernel may name who listens at the peer's address.
    let is_it = found.state == TCP_ESTABLISHED && found.socket_id.destination_port == local.port();
    Ok(is_it.then_some(found.uid))
}

fn read_table(ends: (SocketAddr, SocketAddr)) -> io::Result<Option<u32>> {
    let _reading = TABLE.lock();
    if let Some(user) = find_user(&fs::read_to_string("/proc/net/tcp")?, ends) {
        return Ok(Some(user));
    }
    // A kernel without IPv6 has no such table.
    Ok(find_user(&fs::read_to_string("/proc/net/tcp6").unwrap_or_default(), ends))
}

/// The kernel's code of a connection that is open in both directions.
const ESTABLISHED: &str = "01";

fn find_user(table: &str, ends: (SocketAddr, SocketAddr)) -> Option<u32> {
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, from, to, state, _, _, _, user, ..] = fields[..] else { return None };
        let is_wanted = state == ESTABLISHED && parse_address(from)? == ends.0 && parse_address(to)? == ends.1;
        if is_wanted { user.parse().ok() } else { None }
    })
}

/// An address such as `0100007F:1F41`: words of 32 bits as the processor has them, and the port.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let words = address.as_bytes().chunks(8).map(|word| Some(u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?.to_ne_bytes()));
    let bytes = words.collect::<Option<Vec<_>>>()?.concat();
    let address = match bytes.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => return None,
    };
    Some(canonical(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?)))
}

/// An IPv4 address in IPv6 as IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::process::geteuid;

    use super::*;

    #[test]
    fn a_connections_user_is_found_by_both_ends() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // A host may have no IPv6.
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (peer, local) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let user = geteuid().as_raw();
            for find in [peer_user, |peer, local| read_table((peer, local))] {
                assert_eq!(find(peer, local).unwrap(), Some(user));
                assert_eq!(find(SocketAddr::new(peer.ip(), 1), local).unwrap(), None);
                assert_eq!(find(local, SocketAddr::new(peer.ip(), 1)).unwrap(), None, "a listener is no connection");
            }
        }
    }

    #[test]
    fn the_kernel_is_asked_for_one_connection_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, local) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let _somebody_reads = TABLE.lock();
        // A kernel without sock_diag(7) says so, or knows of no connection.
        if let Ok(Some(user)) = ask_kernel(peer, local) {
            assert_eq!((user, peer_user(peer, local).unwrap()), (geteuid().as_raw(), Some(user)));
        }
    }

    #[test]
    fn only_an_open_connection_reveals_its_user() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:A54D 00000000:0000 0A 00000000:00000000 00:00000000 00000000     5        0 2355576 1\n\
             1: 0100007F:A54D 0100007F:1F41 06 00000000:00000000 00:00000000 00000000     0        0 0 3\n\
             2: 0100007F:A54E 0100007F:1F41 01 00000000:00000000 00:00000000 00000000  1000        0 2348637 1\n\
             3: 0000000000000000FFFF00000100007F:A54F 0000000000000000FFFF00000100007F:1F41 01 0:0 00:0 0  1001        0 1 1\n";
        let from = |port: u16| (SocketAddr::from(([127, 0, 0, 1], port)), SocketAddr::from(([127, 0, 0, 1], 0x1f41)));
        assert_eq!(find_user(table, from(0xa54d)), None, "it was closed, and has nobody");
        assert_eq!(find_user(table, from(0xa54e)), Some(1000));
        assert_eq!(find_user(table, from(0xa54f)), Some(1001));
    }
}
