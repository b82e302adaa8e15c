#include "byteps/recovery/server/copy_record.h"

#include <bit>

#include "byteps/base/wire.h"

namespace byteps {
namespace core {

std::string CopyRecord::Pack() const {
  WireWriter out;
  out.Put(token);
  out.Put(static_cast<uint8_t>(what));
  out.PutText(settled);
  out.Put(round);
  out.Put(rank);
  out.PutText(lacks);
  if (what == kState) {
    out.PutText(declaration);
    out.Put(slots);
    out.Put<uint8_t>(is_all ? 1 : 0);
    out.PutText(last);
  } else if (what == kRound) {
    out.Put(op);
    out.PutText(step);
  }
  return out.Take();
}

bool CopyRecord::Unpack(const std::string& text, CopyRecord* record) {
  WireReader in(text);
  record->token = in.Get<uint64_t>();
  const auto what = in.Get<uint8_t>();
  if (what > kFreed) return false;
  record->what = static_cast<What>(what);
  record->settled = in.GetText();
  record->round = in.Get<uint32_t>();
  record->rank = in.Get<uint32_t>();
  record->lacks = in.GetText();
  if (what == kState) {
    record->declaration = in.GetText();
    record->slots = in.Get<uint32_t>();
    record->is_all = in.Get<uint8_t>() != 0;
    record->last = in.GetText();
  } else if (what == kRound) {
    record->op = in.Get<uint8_t>();
    record->step = in.GetText();
  }
  return in.ok() && in.at_end();
}

}  // namespace core
}  // namespace byteps
