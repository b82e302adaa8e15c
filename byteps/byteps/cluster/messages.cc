#include "byteps/cluster/messages.h"

#include <utility>

#include "byteps/base/out_of_memory.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {
namespace {

ps::Message MakeMessage(int op, int receiver, uint64_t key, uint64_t number) {
  ps::Message msg;
  msg.meta.app_id = 0;
  msg.meta.customer_id = 0;
  msg.meta.timestamp = 0;
  msg.meta.head = op;
  // A transport with two planes sends all else, which moves values, by that of data.
  msg.meta.simple_app = op == kDeclare;
  msg.meta.recver = receiver;
  msg.meta.key = key;
  msg.meta.addr = number;
  msg.meta.val_len = 0;
  msg.meta.option = 0;
  return msg;
}

}  // namespace

ps::Message MakeRequest(int op, int receiver, uint64_t key, uint64_t number, std::string body) {
  ps::Message msg = MakeMessage(op, receiver, key, number);
  msg.meta.request = true;
  msg.meta.push = true;
  msg.meta.body = std::move(body);
  return msg;
}

ps::Message MakeAnswer(int op, int receiver, uint64_t key, uint64_t number,
                       const std::string& error) {
  ps::Message msg = MakeMessage(op, receiver, key, number);
  msg.meta.request = false;
  msg.meta.push = false;
  msg.meta.option = error.empty() ? 0 : 1;
  msg.meta.body = error;
  return msg;
}

void AddValues(ps::Message* msg, const ps::SArray<char>& values) {
  msg->meta.val_len = static_cast<int>(values.size());
  msg->AddData(values);
}

ps::SArray<char> RoomForValues(size_t bytes) {
  return ps::SArray<char>(NewBytes(bytes), bytes, true);
}

}  // namespace core
}  // namespace byteps
