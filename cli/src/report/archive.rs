//! The archive: a compressed tar file of texts, which only its user can read.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use flate2::Compression;
use flate2::write::GzEncoder;

/// A file of the archive.
#[derive(Debug)]
pub(super) struct ReportFile {
    pub(super) name: String,
    pub(super) content: String,
}

/// Writes the files below `folder` into a new archive of mode 0600.
///
/// # Errors
/// When the file exists already, or cannot be written.
pub(super) fn write_archive(path: &Path, folder: &str, files: &[ReportFile]) -> anyhow::Result<()> {
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let file = match created {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            bail!("{} is there already: name another file with --output", path.display())
        }
        created => created.with_context(|| format!("cannot write {}", path.display()))?,
    };
    let written = write_files(GzEncoder::new(file, Compression::default()), folder, files);
    if written.is_err() {
        // Half an archive helps nobody.
        let _ = std::fs::remove_file(path);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn write_files(encoder: GzEncoder<impl Write>, folder: &str, files: &[ReportFile]) -> std::io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut archive = tar::Builder::new(encoder);
    for ReportFile { name, content } in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now);
        archive.append_data(&mut header, format!("{folder}/{name}"), content.as_bytes())?;
    }
    archive.into_inner()?.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn an_archive_is_private_and_replaces_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.tar.gz");
        let files = [ReportFile { name: "logs/n1-0.log".into(), content: "a line\n".into() }];
        write_archive(&path, "report", &files).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let mut archive = tar::Archive::new(GzDecoder::new(std::fs::File::open(&path).unwrap()));
        let mut entries = archive.entries().unwrap();
        let mut entry = entries.next().unwrap().unwrap();
        let mut content = String::new();
        entry.read_to_string(&mut content).unwrap();
        assert_eq!((entry.path().unwrap().to_str(), content.as_str()), (Some("report/logs/n1-0.log"), "a line\n"));
        assert!(entries.next().is_none());
        let again = write_archive(&path, "report", &files).unwrap_err().to_string();
        assert!(again.contains("is there already"), "{again}");
    }
}
