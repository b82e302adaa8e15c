// What a channel carries: the requests of workers and the answers of servers (base/protocol.h), and
// what servers send each other.
#ifndef BYTEPS_CLUSTER_MESSAGE_H_
#define BYTEPS_CLUSTER_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "byteps/base/shared_bytes.h"

namespace byteps {
namespace core {

// All of a message but its body and its values.
struct MessageHead {
  int op = 0;  // an Op
  bool is_request = true;
  bool failed = false;  // of an answer: the body says why
  // Both ends are servers (BYTEPS_BACKUP_STATE): requests and answers go either way.
  bool between_servers = false;
  // Rank of the other end: on a worker a server's, on a server a worker's, unless it is a server's.
  int peer = -1;
  uint64_t key = 0;
  uint64_t number = 0;  // by which a worker knows its request, and the answer
};

struct Message : MessageHead {
  std::string body;
  SharedBytes values;
  // Bytes of values that the peer has sent.  More than `values` has, where they were dropped: they
  // had no place (ChannelUser::PlaceFor), or this process no memory for them.  kInPieces where
  // there was more than one piece of them, which no request or answer has.
  uint64_t sent_bytes = 0;
  static constexpr uint64_t kInPieces = UINT64_MAX;

  void SetValues(SharedBytes bytes) {
    sent_bytes = bytes.size();
    values = std::move(bytes);
  }
};

inline Message MakeRequest(int op, int server, uint64_t key, uint64_t number, std::string body) {
  Message message;
  message.op = op;
  message.peer = server;
  message.key = key;
  message.number = number;
  message.body = std::move(body);
  return message;
}

// An answer with an `error` says that the request failed.
inline Message MakeAnswer(int op, int worker, uint64_t key, uint64_t number, std::string error) {
  Message message = MakeRequest(op, worker, key, number, std::move(error));
  message.is_request = false;
  message.failed = !message.body.empty();
  return message;
}

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_MESSAGE_H_
