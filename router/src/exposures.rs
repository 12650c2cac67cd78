//! Lists what a router leaves open, one line each for the person who starts it: access without a
//! key, and traffic in plain text.

use std::net::SocketAddr;

/// Something that is open to anyone who reaches an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exposure {
    /// The setting that closes the exposure.
    pub setting: &'static str,
    pub address: SocketAddr,
    pub description: &'static str,
}

impl Exposure {
    /// Whether other hosts can reach the address too.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        !self.address.ip().is_loopback()
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Listeners {
    pub(crate) edge: SocketAddr,
    pub(crate) agents: SocketAddr,
    pub(crate) admin: SocketAddr,
    /// Whether requests need a key, or their clients a certificate.
    pub(crate) has_keys: bool,
    pub(crate) has_edge_tls: bool,
    pub(crate) has_admin_tls: bool,
    /// Whether agents must show a certificate, or belong to this user.
    pub(crate) checks_agents: bool,
}

/// Lists the exposures. Plain text within this host is none: only the host's root could listen.
pub(crate) fn find_exposures(doors: &Listeners) -> Vec<Exposure> {
    let Listeners { edge, agents, admin, .. } = *doors;
    let is_far = |address: SocketAddr| !address.ip().is_loopback();
    let lines = [
        (!doors.has_keys, "router.keys_file", edge, "no keys: whoever reaches it may use the models"),
        (!doors.has_edge_tls && is_far(edge), "router.listen", edge, "no TLS: prompts, answers and keys travel in plain text"),
        (!doors.checks_agents, "router.agents_listen", agents, "no TLS: whoever reaches it may join as an agent and gets requests"),
        (
            !doors.has_admin_tls && is_far(admin),
            "router.admin_listen",
            admin,
            "no TLS: admin keys and the page's sessions travel in plain text",
        ),
    ];
    lines
        .into_iter()
        .filter(|(is_open, ..)| *is_open)
        .map(|(_, setting, address, what)| Exposure { setting, address, description: what })
        .collect()
}

#[cfg(test)]
mod tests;
