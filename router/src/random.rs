//! Bytes of the system's random number generator, for secrets.

/// Random bytes. Waits only while the system itself starts.
///
/// # Errors
/// If the system gives none.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut random = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut random[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(random)
}
