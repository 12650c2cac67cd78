//! A gRPC client that sends exactly what it is given, and watches no deadline.

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio_util::task::AbortOnDropHandle;
use tonic::Code;

use crate::harness::{Fleet, soon};

pub(super) struct Raw {
    sender: http2::SendRequest<Full<Bytes>>,
    _connection: AbortOnDropHandle<()>,
}

/// Outcome of a call.
#[derive(Debug)]
pub(super) struct Called {
    pub(super) status: u16,
    /// Bytes of the body.
    pub(super) bytes: usize,
    /// Headers, including the trailers.
    pub(super) headers: HeaderMap,
}

impl Called {
    pub(super) fn code(&self) -> Code {
        Code::from_bytes(self.headers["grpc-status"].as_bytes())
    }
}

impl Raw {
    pub(super) async fn connect(fleet: &Fleet) -> Self {
        let stream = tokio::net::TcpStream::connect(fleet.routers[0].edge).await.unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        Self { sender, _connection: AbortOnDropHandle::new(tokio::spawn(async { drop(connection.await) })) }
    }

    pub(super) async fn call(&self, path: &str, message: &impl prost::Message, headers: &[(&str, &str)]) -> Called {
        let mut body = vec![0; 5];
        message.encode(&mut body).unwrap();
        let length = u32::try_from(body.len() - 5).unwrap();
        body[1..5].copy_from_slice(&length.to_be_bytes());
        let mut request = http::Request::post(format!("http://test{path}")).header("te", "trailers");
        let given = request.headers_mut().unwrap();
        given.insert("content-type", "application/grpc".parse().unwrap());
        for (name, value) in headers {
            given.insert(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        let (head, body) =
            soon(path, self.sender.clone().send_request(request.body(Full::from(body)).unwrap())).await.unwrap().into_parts();
        let body = soon(path, body.collect()).await.unwrap();
        let mut headers = head.headers;
        headers.extend(body.trailers().cloned().unwrap_or_default());
        Called { status: head.status.as_u16(), bytes: body.to_bytes().len(), headers }
    }
}
