#include "byteps/observe/status_record.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "byteps/base/log.h"
#include "byteps/base/process.h"
#include "byteps/base/wire.h"
#include "byteps/net/membership/event.h"

namespace byteps {
namespace core {
namespace {

constexpr size_t kLateBytes = 4 + 8 + 8;
constexpr size_t kNumbers = 13;
constexpr size_t kNicBytes = 2 + StatusRecord::kMaxNic + 8 + 8;
static_assert(2 + 4 + 8 * kNumbers + 2 + StatusRecord::kMaxHost + 2 + StatusRecord::kMaxProblem +
                      1 + StatusRecord::kMaxLate * kLateBytes + 1 +
                      StatusRecord::kMaxNics * kNicBytes <=
                  ps::kMaxReport,
              "a record must fit a heartbeat");

// Visits the record's numbers in wire order.
template <typename Record, typename Visit>
void EachNumber(Record* r, Visit visit) {
  visit(&r->clock_ns);
  visit(&r->sent_bytes);
  visit(&r->received_bytes);
  visit(&r->finished);
  visit(&r->failed);
  visit(&r->running);
  visit(&r->tensors);
  visit(&r->keys);
  visit(&r->queued);
  visit(&r->busy_ns);
  visit(&r->problems);
  visit(&r->problem_unix_ms);
  visit(&r->sums_since);
}

void PutText(ps::ByteWriter* out, const std::string& text, size_t most) {
  const std::string part = ps::CutText(text, most);
  out->Int(static_cast<uint16_t>(part.size()));
  out->Bytes(part);
}

bool GetText(ps::ByteReader* in, std::string* text, size_t most) {
  uint16_t size = 0;
  return in->Int(&size) && size <= most && in->Bytes(size, text);
}

}  // namespace

std::string StatusRecord::Pack() const {
  std::string bytes;
  ps::ByteWriter out(&bytes);
  out.Int(kVersion);
  out.Int(static_cast<uint8_t>(role));
  out.Int(pid);
  EachNumber(this, [&out](const auto* number) { out.Int(*number); });
  PutText(&out, host, kMaxHost);
  PutText(&out, problem, kMaxProblem);
  const size_t count = std::min(late.size(), kMaxLate);
  out.Int(static_cast<uint8_t>(count));
  for (size_t i = 0; i < count; ++i) {
    out.Int(late[i].rank);
    out.Int(late[i].sums);
    out.Int(late[i].wait_ns);
  }
  const size_t of_nics = std::min(nics.size(), kMaxNics);
  out.Int(static_cast<uint8_t>(of_nics));
  for (size_t i = 0; i < of_nics; ++i) {
    PutText(&out, nics[i].nic, kMaxNic);
    out.Int(nics[i].bytes_sent);
    out.Int(nics[i].bytes_received);
  }
  return bytes;
}

bool StatusRecord::Parse(const std::string& bytes, StatusRecord* record) {
  ps::ByteReader in(bytes.data(), bytes.size());
  uint8_t version = 0, role = 0, count = 0;
  if (!in.Int(&version) || version != kVersion) return false;
  if (!in.Int(&role) || !in.Int(&record->pid)) return false;
  if (role != static_cast<uint8_t>(Role::kWorker) && role != static_cast<uint8_t>(Role::kServer)) {
    return false;
  }
  record->role = static_cast<Role>(role);
  bool whole = true;
  EachNumber(record, [&in, &whole](auto* number) { whole = whole && in.Int(number); });
  if (!whole || !GetText(&in, &record->host, kMaxHost) ||
      !GetText(&in, &record->problem, kMaxProblem) || !in.Int(&count) || count > kMaxLate) {
    return false;
  }
  record->late.resize(count);
  for (LateWorker& worker : record->late) {
    if (!in.Int(&worker.rank) || !in.Int(&worker.sums) || !in.Int(&worker.wait_ns)) return false;
  }
  if (!in.Int(&count) || count > kMaxNics) return false;
  record->nics.resize(count);
  for (ps::NicReading& nic : record->nics) {
    if (!GetText(&in, &nic.nic, kMaxNic) || !in.Int(&nic.bytes_sent) ||
        !in.Int(&nic.bytes_received)) {
      return false;
    }
  }
  return in.left() == 0;
}

void DescribeProcess(StatusRecord* record) {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  record->host = name;
  record->pid = static_cast<uint32_t>(getpid());
  record->clock_ns = static_cast<uint64_t>(SteadyNs());
  const ps::LoggedProblem problem = ps::LastLoggedProblem();
  record->problems = problem.count;
  record->problem_unix_ms = problem.unix_ms;
  record->problem = problem.text;
  record->nics = ps::ReadNicCounters();
}

}  // namespace core
}  // namespace byteps
