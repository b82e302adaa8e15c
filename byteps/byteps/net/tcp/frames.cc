#include "byteps/net/tcp/frames.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/wire.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/tcp/socket.h"

namespace ps {
namespace tcp {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

MemoryPool::~MemoryPool() {
  for (char* block : idle_.TakeAll()) free(block);
}

size_t MemoryPool::Rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

SArray<char> MemoryPool::Take(size_t bytes) {
  const size_t size = Rounded(bytes);
  char* block = nullptr;
  {
    MutexLock lock(&mu_);
    ++out_;
    idle_.Take(size, &block);
  }
  if (block == nullptr) block = static_cast<char*>(aligned_alloc(kPage, size));
  if (block == nullptr) {
    MutexLock lock(&mu_);
    --out_;
    throw std::bad_alloc();
  }
  SArray<char> values;
  // Holds the pool: values may outlive the connections.
  values.reset(block, bytes,
               [self = shared_from_this(), size](char* memory) { self->Return(memory, size); });
  return values;
}

void MemoryPool::Return(char* block, size_t size) {
  {
    MutexLock lock(&mu_);
    BPS_INVARIANT_NOTED("a block is returned once", out_ > 0,
                        "one of " + std::to_string(size) + " bytes, while all were there");
    out_ -= out_ > 0 ? 1 : 0;
    if (idle_.Keep(size, block)) return;
  }
  free(block);
}

const char* ReadBuffer::Peek(size_t bytes) {
  if (size() >= bytes) return data();
  Need(bytes);
  return nullptr;
}

// Makes room, so that the next reads can complete what begins at begin_.
void ReadBuffer::Need(size_t bytes) {
  if (begin_ > 0) {
    memmove(bytes_.data(), bytes_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (bytes_.size() < bytes) bytes_.resize(bytes);
}

void ReadBuffer::Shrink() {
  if (bytes_.size() <= kBytes || size() > kBytes) return;
  Need(0);
  bytes_.resize(kBytes);
  bytes_.shrink_to_fit();
}

iovec ReadBuffer::Room() {
  if (begin_ == end_) begin_ = end_ = 0;
  return {bytes_.data() + end_, bytes_.size() - end_};
}

void ReadBuffer::Add(size_t bytes) {
  end_ += bytes;
  BPS_INVARIANT("nothing is read beyond its place", end_ <= bytes_.size(),
                std::to_string(end_) + " bytes of " + std::to_string(bytes_.size()));
}

ssize_t FrameReader::Read(Stream* socket, bool* all) {
  iovec vector[2];
  int count = 0;
  // What goes nowhere is read into the buffer.
  const size_t missing =
      phase_ == Phase::kValues && place_ != nullptr ? place_bytes_ - place_done_ : 0;
  if (missing > 0) vector[count++] = {place_ + place_done_, missing};
  vector[count++] = buffer_.Room();
  const size_t room = missing + vector[count - 1].iov_len;
  const ssize_t n = socket->Read(vector, count);
  if (n <= 0) return n;
  *all = static_cast<size_t>(n) < room && !socket->encrypted();
  const size_t placed = std::min<size_t>(n, missing);
  place_done_ += placed;
  buffer_.Add(n - placed);
  BPS_INVARIANT("nothing is read beyond its place", place_done_ <= place_bytes_,
                std::to_string(place_done_) + " of " + std::to_string(place_bytes_) + " bytes");
  return n;
}

FrameReader::Step FrameReader::Next() {
  while (true) {
    switch (phase_) {
      case Phase::kHead:
        return ReadHead();
      case Phase::kMeta:
        if (!ReadMeta()) return Step::kMore;
        break;
      case Phase::kValues:
        return ReadValues() ? Step::kMessage : Step::kMore;
    }
  }
}

FrameReader::Step FrameReader::ReadHead() {
  const char* data = buffer_.Peek(kFrameHeaderBytes);
  if (data == nullptr) return Step::kMore;
  if (!DecodeFrameHeader(data, &header_)) throw Error("it sent what is no message");
  buffer_.Skip(kFrameHeaderBytes);
  frame_bytes_ = kFrameHeaderBytes;
  if (header_.type == kMessage) phase_ = Phase::kMeta;
  goodbye_ = goodbye_ || header_.type == kGoodbye;
  return Step::kHead;
}

bool FrameReader::ReadMeta() {
  const size_t sizes_bytes = header_.values * sizeof(uint64_t);
  const size_t bytes = sizes_bytes + header_.meta_bytes;
  const char* data = buffer_.Peek(bytes);
  if (data == nullptr) return false;
  ByteReader in(data, sizes_bytes);
  sizes_.resize(header_.values);
  for (uint64_t& size : sizes_) {
    in.Int(&size);
    if (size > kMaxValueBytes) throw Error("it sent a message of impossible size");
  }
  if (!DecodeMeta(data + sizes_bytes, header_.meta_bytes, &incoming_.meta)) {
    throw Error("it sent a message whose meta of " + std::to_string(header_.meta_bytes) +
                " bytes does not parse");
  }
  incoming_.meta.sender = sender_;
  buffer_.Skip(bytes);
  frame_bytes_ += bytes;
  buffer_.Shrink();
  drop_ = false;
  value_ = 0;
  phase_ = Phase::kValues;
  BeginValue();
  return true;
}

// Sets where the next value is read to.
void FrameReader::BeginValue() {
  place_ = nullptr;
  place_bytes_ = place_done_ = 0;
  if (value_ == sizes_.size()) return;
  place_bytes_ = sizes_[value_];
  SArray<char> values;
  if (place_bytes_ > 0) {
    const bool one = sizes_.size() == 1;
    const uint64_t all = std::accumulate(sizes_.begin(), sizes_.end(), uint64_t{0});
    char* const place = places_->PlaceFor(incoming_.meta, all);
    if (one || place == Nowhere()) place_ = place;
    if (place_ != nullptr && place_ != Nowhere()) {
      // The peer answers only what it has received, and the answer may lie where that was.
      TakeBack(place_);
      values.reset(place_, place_bytes_, [](char*) {});
    }
  }
  if (place_bytes_ > 0 && place_ == nullptr) {
    try {
      values = pool_->Take(place_bytes_);
      place_ = values.data();
    } catch (const std::bad_alloc&) {
      place_ = Nowhere();  // for the owner to say of whose values that is
    }
  }
  if (place_ == Nowhere()) {
    incoming_.meta.data_size = static_cast<int>(place_bytes_);
    place_ = nullptr;
  }
  incoming_.data.push_back(values);
}

bool FrameReader::ReadValues() {
  while (value_ < sizes_.size()) {
    const size_t there =
        std::min(place_bytes_ - place_done_, buffer_.size());  // came with the meta
    if (there > 0) {
      if (place_ != nullptr) memcpy(place_ + place_done_, buffer_.data(), there);
      place_done_ += there;
      buffer_.Skip(there);
    }
    if (place_done_ < place_bytes_) return false;
    frame_bytes_ += place_bytes_;
    ++value_;
    BeginValue();
  }
  return true;
}

bool FrameReader::Take(Message* msg, size_t* bytes) {
  *msg = std::move(incoming_);
  incoming_ = Message();
  phase_ = Phase::kHead;
  *bytes = frame_bytes_;
  return !drop_;
}

Message FrameReader::Restart() {
  phase_ = Phase::kHead;
  place_ = nullptr;
  return std::exchange(incoming_, Message());
}

void FrameReader::Abandon(const void* begin, size_t bytes) {
  if (phase_ != Phase::kValues || place_ == nullptr) return;
  const char* first = static_cast<const char*>(begin);
  if (place_ >= first + bytes || place_ + place_bytes_ <= first) return;
  SArray<char> elsewhere = pool_->Take(place_bytes_);
  place_ = elsewhere.data();
  incoming_.data.back() = elsewhere;
  drop_ = true;
  PS_PROBE(kAbandoned);
  BPS_INVARIANT_NOTED("what is abandoned is not written to",
                      place_ >= first + bytes || place_ + place_bytes_ <= first,
                      std::to_string(place_bytes_) + " bytes are read into it");
}

namespace {

// Messages of at most this size go before larger ones, several by one call.
constexpr size_t kUrgentBytes = 4096;
constexpr size_t kBatchBytes = 65536;
constexpr size_t kMaxVectors = 64;

}  // namespace

OutgoingPtr MakeMessage(const Message& msg) {
  const std::string meta = EncodeMeta(msg.meta);
  auto outgoing = std::make_shared<Outgoing>();
  FrameHeader header;
  header.values = static_cast<uint8_t>(msg.data.size());
  header.meta_bytes = static_cast<uint32_t>(meta.size());
  outgoing->head.reserve(kFrameHeaderBytes + 8 * msg.data.size() + meta.size());
  ByteWriter head(&outgoing->head);
  head.Bytes(header.Encode());
  for (const auto& value : msg.data) head.Int<uint64_t>(value.size());
  head.Bytes(meta);
  outgoing->values = msg.data;
  outgoing->bytes = outgoing->head.size();
  for (const auto& value : msg.data) outgoing->bytes += value.size();
  return outgoing;
}

OutgoingPtr MakeFrame(FrameType type) {
  auto outgoing = std::make_shared<Outgoing>();
  FrameHeader header;
  header.type = outgoing->type = type;
  outgoing->head = header.Encode();
  outgoing->bytes = outgoing->head.size();
  return outgoing;
}

size_t BytesOf(const OutgoingList& list) {
  size_t bytes = 0;
  for (const auto& outgoing : list) bytes += outgoing->bytes;
  return bytes;
}

std::vector<iovec> VectorOf(const OutgoingList& list, size_t done) {
  std::vector<iovec> vector;
  const auto add = [&](const char* data, size_t size) {
    const size_t skipped = std::min(done, size);
    done -= skipped;
    if (size > skipped) vector.push_back({const_cast<char*>(data) + skipped, size - skipped});
  };
  for (const auto& outgoing : list) {
    add(outgoing->head.data(), outgoing->head.size());
    for (const auto& value : outgoing->values) add(value.data(), value.size());
  }
  return vector;
}

void SendQueue::Push(OutgoingPtr outgoing) {
  bytes_ += outgoing->bytes;
  const bool urgent = outgoing->bytes <= kUrgentBytes && outgoing->type != kGoodbye;
  (urgent ? urgent_ : bulk_).push_back(std::move(outgoing));
}

bool SendQueue::TakeBatch(uint64_t received, OutgoingList* batch) {
  size_t bytes = 0, vectors = 0;
  while (vectors < kMaxVectors) {
    auto& queue = !again_.empty() ? again_ : !urgent_.empty() ? urgent_ : bulk_;
    if (queue.empty()) break;
    // A large message goes alone, or last, so that urgent ones need not wait for several.
    if (bytes > 0 && bytes + queue.front()->bytes > kBatchBytes) break;
    const OutgoingPtr next = std::move(queue.front());
    queue.pop_front();
    bytes += next->bytes;
    vectors += 1 + next->values.size();
    if (next->type == kMessage) {
      log_.Add(next);
      bytes_in_flight_ += next->bytes;
    }
    std::string told;
    ByteWriter(&told).Int<uint64_t>(received);
    next->head.replace(kReceivedOffset, told.size(), told);
    batch->push_back(next);
  }
  BPS_INVARIANT_NOTED("bytes queued are those of the messages queued",
                      !batch->empty() || bytes_ == 0,
                      std::to_string(bytes_) + " without a message");
  return !batch->empty();
}

void SendQueue::Written(size_t bytes) {
  BPS_INVARIANT_NOTED(
      "bytes queued are those of the messages queued", bytes_ >= bytes,
      std::to_string(bytes) + " bytes were written, and " + std::to_string(bytes_) + " queued");
  bytes_ -= bytes;
}

void SendQueue::Arrived(uint64_t received, OutgoingList* arrived) {
  const size_t before = arrived->size();
  log_.Arrived(received, arrived);
  for (size_t i = before; i < arrived->size(); ++i) bytes_in_flight_ -= (*arrived)[i]->bytes;
}

size_t SendQueue::Resume(uint64_t received, OutgoingList* arrived) {
  OutgoingList again = log_.Resume(received, arrived);
  // Where the last socket broke amid what was sent again, the rest of that is behind it.
  for (auto& message : again_) again.push_back(std::move(message));
  again_.swap(again);
  bytes_ = BytesOf(again_) + BytesOf(urgent_) + BytesOf(bulk_);
  bytes_in_flight_ = 0;
  return again_.size();
}

OutgoingList SendQueue::TakeAll() {
  OutgoingList all = log_.TakeAll();
  for (OutgoingList* list : {&again_, &urgent_, &bulk_}) {
    for (auto& outgoing : *list) all.push_back(std::move(outgoing));
    list->clear();
  }
  bytes_ = bytes_in_flight_ = 0;
  return all;
}

}  // namespace tcp
}  // namespace ps
